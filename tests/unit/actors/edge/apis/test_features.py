"""Guides, logits processors, priorities and aliases through the whole edge: what the engine gets, what is refused."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headwater.schemas.inference import Guide
from tests.support.worlds.edge import ANSWER, EdgeWorld

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOUND: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """One edge; beside the model that can do everything one that can do nothing optional, and one that embeds."""
    with EdgeWorld() as world:
        world.serve("plain", capabilities=frozenset({"generate"}))
        world.serve("vectors", capabilities=frozenset({"embed"}), tasks=("embed",))
        yield world


def refused(edge: EdgeWorld, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """The error object of a request that is refused with 400."""
    return edge.refused(path, {**SOUND, "prompt": "hi", **fields})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_guide_reaches_the_engine_and_the_router(edge: EdgeWorld, path: str) -> None:
    """With several choices and log probabilities: each choice is guided, and only able workers are asked for."""
    edge.given.clear()
    edge.queries.clear()
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "n": 2,
        "seed": 5,
        "logprobs": True if path == CHAT else 1,
    }
    response = edge.ask(path, {**SOUND, "prompt": "hi", **fields})
    assert response.status == 200, response.body
    assert all(choice["logprobs"] for choice in response.document["choices"])
    guide = Guide("json_schema", msgspec.json.encode(SCHEMA).decode())
    assert [request.sampling.guide for request in edge.given] == [guide, guide]
    assert [request.sampling.seed for request in edge.given] == [5, 6]
    assert [query.constraints.needs for query in edge.queries] == [("logprobs", "guide")] * 2


@pytest.mark.parametrize(
    ("capability", "fields"),
    [
        ("guide", {"response_format": {"type": "json_object"}}),
        ("guide", {"guided_choice": ["a"]}),
        ("guide", {"structured_outputs": {"regex": "a"}}),
        ("processors", {"logits_processors": ["shout"]}),
        ("logprobs", {"logprobs": True}),
        ("logit_bias", {"logit_bias": {"3": 1}}),
        ("cache_salt", {"cache_salt": "tenant 1"}),
    ],
)
def test_what_an_engine_can_not_do_is_refused_with_the_capability(
    edge: EdgeWorld, capability: str, fields: dict[str, Any]
) -> None:
    """The message names model, engine and capability; `param` names the field."""
    error = refused(edge, model="plain", **fields)
    assert f"capability '{capability}'" in error["message"]
    assert "plain" in error["message"]
    assert error["param"].startswith(next(iter(fields)))


def test_logits_processors_are_known_by_name(edge: EdgeWorld) -> None:
    """Names with arguments, or names alone; what engines call by a path to code is no name."""
    edge.given.clear()
    edge.ask(CHAT, {**SOUND, "logits_processors": {"shout": {"by": [1, {"a": 2.5}]}, "hush": None}})
    edge.ask(CHAT, {**SOUND, "logits_processors": ["hush"]})
    edge.ask(CHAT, {**SOUND, "logits_processors": []})
    given = [request.sampling.processors for request in edge.given]
    assert given == [{"shout": {"by": [1, {"a": 2.5}]}, "hush": {}}, {"hush": {}}, {}]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (["os.system"], "Available: hush, shout"),
        ({"whisper": {}}, "Available: hush, shout"),
        ([{"qualname": "os.system", "args": ["x"]}], "list of names"),
        ("shout", "list of names"),
        (3, "list of names"),
        ({"shout": 3}, "object of arguments"),
        ({"shout": {"x": 2**64}}, "64 bits"),
        ({"shout": {"x": [[[[[[[[[1]]]]]]]]]}}, "deeper than 8"),
        ({"shout": {"x": "y" * 20_000}}, "16384 bytes"),
    ],
)
def test_any_other_processor_is_refused(edge: EdgeWorld, value: Any, says: str) -> None:
    error = refused(edge, logits_processors=value)
    assert says in error["message"]
    assert error["param"].startswith("logits_processors")


@pytest.mark.parametrize("fields", [{"guided_choice": ["a"]}, {"logits_processors": ["shout"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_state_is_lost_ends_with_one_clear_error(
    edge: EdgeWorld, fields: dict[str, Any], stream: bool
) -> None:
    """Another worker would begin its grammar anew in the middle of the answer. Before the first token it may move."""
    edge.given.clear()
    edge.breaks_after = [3]
    response = edge.ask(CHAT, {**SOUND, **fields, "stream": stream})
    assert len(edge.given) == 1, "it was not moved"
    if stream:
        last = response.body.strip().rsplit(b"data: ", 1)[1]
        error = msgspec.json.decode(last)["error"]
    else:
        assert response.status == 502
        error = response.document["error"]
    assert error["code"] == "worker_failed"
    assert "after 3 tokens was lost" in error["message"]
    edge.breaks_after = [0]
    response = edge.ask(CHAT, {**SOUND, **fields, "max_tokens": 5})
    assert (response.status, len(edge.given)) == (200, 3)
    assert response.document["choices"][0]["message"]["content"] == ANSWER[:5]


def test_a_free_answer_moves_in_the_middle(edge: EdgeWorld) -> None:
    """So the error above comes from the guide."""
    edge.given.clear()
    edge.breaks_after = [3]
    response = edge.ask(CHAT, SOUND)
    assert response.document["choices"][0]["message"]["content"] == ANSWER
    assert [request.emitted for request in edge.given] == [0, 3]


def test_priority_is_a_hint(edge: EdgeWorld) -> None:
    """An engine that knows priorities gets it; for one that does not it is as good as not sent."""
    edge.given.clear()
    edge.ask(CHAT, {**SOUND, "priority": -3, "cache_salt": "s" * 1024})
    edge.ask(CHAT, {**SOUND, "priority": -3, "model": "plain"})
    edge.ask(CHAT, SOUND)
    assert [request.priority for request in edge.given] == [-3, 0, 0]
    assert [request.cache_salt for request in edge.given] == ["s" * 1024, "", ""]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_model_that_only_embeds_does_not_generate(edge: EdgeWorld, path: str) -> None:
    error = refused(edge, path, model="vectors")
    assert "/v1/embeddings" in error["message"]
    assert error["param"] == "model"


def test_models_are_listed_with_what_they_can_do(edge: EdgeWorld) -> None:
    """Capabilities, limits and names of logits processors, for all and for one."""
    listed = {card["id"]: card for card in edge.ask("/v1/models", b"", method="GET").document["data"]}
    assert set(listed) == {"m", "plain", "vectors"}
    assert listed["plain"]["capabilities"] == ["generate"]
    assert listed["vectors"]["pooling_tasks"] == ["embed"]
    one = edge.ask("/v1/models/m", b"", method="GET").document
    assert one == listed["m"]
    assert one["max_model_len"] == one["limits"]["context_tokens"] == 4096
    assert one["limits"] == {
        "context_tokens": 4096, "running_requests": 256, "kv_blocks": 1000, "block_tokens": 16, "lora_slots": 0, "media_tokens": {},
    }  # fmt: skip
    assert one["logits_processors"] == ["hush", "shout"]
    assert "guide" in one["capabilities"]
