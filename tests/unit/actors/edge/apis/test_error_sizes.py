"""Error responses of the application: at most 2 KB, and always a 4xx, where a client's own names are in them."""

from typing import Any

import pytest

from tests.support.worlds.edge import EdgeWorld

BYTES_MAX = 2048
LONG = "n" * 100_000
MESSAGES = [{"role": "user", "content": "hello"}]

BODIES: dict[str, dict[str, Any] | bytes] = {
    "model": {"model": LONG, "messages": MESSAGES},
    "role": {"model": "m", "messages": [{"role": LONG, "content": "x"}]},
    "type of a part": {"model": "m", "messages": [{"role": "user", "content": [{"type": LONG}]}]},
    "key of logit_bias": {"model": "m", "messages": MESSAGES, "logit_bias": {LONG: 1}},
    "number": {"model": "m", "messages": MESSAGES, "max_tokens": 10**400},
    "value of an enumeration": {"model": "m", "messages": MESSAGES, "response_format": {"type": LONG}},
    "processor": {"model": "m", "messages": MESSAGES, "logits_processors": {LONG: {}}},
    "tool": {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": {"name": LONG}}]},
    "property of a schema": {
        "model": "m",
        "messages": MESSAGES,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "properties": {LONG: {"type": LONG}}}},
        },
    },
    "variable of the template": {"model": "m", "messages": MESSAGES, "chat_template_kwargs": LONG},
    "not JSON": LONG.encode(),
    "surrogates": b'{"model": "' + b"\\ud800" * 20_000 + b'", "messages": []}',
}


@pytest.mark.parametrize("what", BODIES)
def test_an_invalid_body_is_not_repeated(edge: EdgeWorld, what: str) -> None:
    """However long the name that is wrong."""
    response = edge.ask("/v1/chat/completions", BODIES[what])
    assert 400 <= response.status < 500
    assert len(response.body) <= BYTES_MAX
    assert response.document["error"]["message"]


@pytest.mark.parametrize(
    "header", ["x-headwater-tenant", "x-headwater-worker", "x-headwater-policy", "x-headwater-tier"]
)
def test_an_invalid_header_is_not_repeated(edge: EdgeWorld, header: str) -> None:
    """Nor a path."""
    response = edge.ask(
        "/v1/chat/completions",
        {"model": "m", "messages": MESSAGES},
        headers=[(header.encode(), LONG.encode())],
    )
    assert response.status == 400
    assert len(response.body) <= BYTES_MAX
    assert len(edge.ask("/" + LONG, {}, method="GET").body) <= BYTES_MAX
    assert len(edge.ask("/v1/models/" + LONG, {}, method="GET").body) <= BYTES_MAX
