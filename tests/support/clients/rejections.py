"""Requests that are refused with HTTP 400 after one attempt at most, and the check that they are."""

import re
from typing import Any, NamedTuple

import httpx

from tests.support.processes.fleet import FleetProcess

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8}
PROMPT: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 8}


class Case(NamedTuple):
    """`fields` added to a small request give 400, and the error names `field`."""

    name: str
    field: str
    fields: dict[str, Any]
    path: str = COMPLETIONS


def body_of(case: Case, model: str) -> dict[str, Any]:
    """The request of a case."""
    return {"model": model, **(HELLO if case.path == CHAT else PROMPT), **case.fields}


async def migrations(client: httpx.AsyncClient) -> float:
    """The edge's count of moves from one worker to another."""
    page = (await client.get("/metrics")).text
    found = re.findall(r"^headwater_migrations_total(?:\{[^}]*\})? (\S+)$", page, re.MULTILINE)
    return sum(float(one) for one in found)


def moves(up: FleetProcess) -> int:
    """Failed attempts that the edge logged."""
    return up.log.read_bytes().count(b'"request_moved"')


async def assert_refused(up: FleetProcess, case: Case, model: str, *, stream: bool = False) -> None:
    """One attempt at most, HTTP 400 with an error object that names the field."""
    async with up.client() as client:
        before, moved = moves(up), await migrations(client)
        answer = await client.post(case.path, json={**body_of(case, model), "stream": stream})
        assert answer.status_code == 400, (answer.status_code, answer.text)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert case.field in (error["param"] or "") or case.field in error["message"], error
        assert not re.search(r"VLLM|Error\b|worker-\d|was moved", error["message"]), error["message"]
        assert (moves(up), await migrations(client)) == (before, moved)
