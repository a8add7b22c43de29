"""The traces run on the working tree, and touch no more files than before.

Since several APIs share one generation core, a request passes the API's own types and translation, the internal
request, and its preparation: twelve files more than with one API.
"""

from tests.tidy.trace_files import trace

FILES_MAX = {"request": 52, "prompt": 26, "kv-event": 12, "vllm-event": 4}
"""Files that each trace may touch. Lowered when the code improves, raised only by a new step of serving a request
(authentication; rate and time limits; the search for control tokens without the lock; the internal request between an API and the engines; the body, which its buffer hid from the trace; messages, apart from the rest of a request)."""


def test_a_prompt_and_a_kv_event_are_followed() -> None:
    found = trace()
    assert next(iter(found["request"])) == "actors/http/connection.py"
    assert "actors/edge/clients/router_client.py" in found["prompt"]
    assert any(name.startswith("router/index/") for name in found["kv-event"])
    assert next(iter(found["vllm-event"])).startswith("engines/kv_events/")
    counts = {name: len(files) for name, files in found.items()}
    assert all(counts[name] <= FILES_MAX[name] for name in counts), counts
