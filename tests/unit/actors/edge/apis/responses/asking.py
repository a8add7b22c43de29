"""Requests to an edge on memory ports, and what its worker got."""

from typing import Any

from headwater.schemas.hashing import unpack_tokens
from tests.support.worlds.edge import EdgeWorld, Response

USER = {"type": "message", "role": "user", "content": "Hello."}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def create(edge: EdgeWorld, path: str = "/v1/responses", /, **fields: Any) -> Response:
    return edge.ask(path, {"model": "m", "input": "Hello.", **fields})


def prompt(edge: EdgeWorld) -> str:
    """The prompt that the worker got last."""
    return edge.runner.run(_text(edge))


def prompt_tokens(edge: EdgeWorld) -> list[int]:
    return [int(token) for token in unpack_tokens(edge.given[-1].tokens)]


async def _text(edge: EdgeWorld) -> str:
    model = edge.models.get("m")
    return "".join(model.tokenizer.text_of(token) for token in prompt_tokens(edge))


def error_of(response: Response, status: int = 400) -> dict[str, Any]:
    assert response.status == status, response.body
    error: dict[str, Any] = response.document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
