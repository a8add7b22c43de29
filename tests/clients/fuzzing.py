"""Requests made from published API documents and from our own, sent to a fleet: no 5xx, no hang, bounded errors."""

import asyncio
import json
import random
from collections import Counter
from importlib import resources
from typing import Any, Final, NamedTuple

import httpx

from tests.clients.conftest import MODEL
from tests.support.clients.schema_samples import SchemaSampler, encode

CONCURRENT: Final = 8
REQUEST_S: Final = 30
ERROR_BYTES_MAX: Final = 2_048

CHOSEN: Final[dict[str, tuple[float, list[Any]]]] = {
    "model": (1.0, [MODEL]),
    "messages": (0.5, [[{"role": "user", "content": "Hi"}]]),
    "input": (0.5, ["Hi"]),
    "max_tokens": (0.95, [1, 3, 8]),
    "max_completion_tokens": (0.95, [1, 3, 8]),
    "max_output_tokens": (0.95, [1, 3, 8]),
    "n": (0.9, [1, 2]),
    "best_of": (0.9, [1, 2]),
    "prompt": (0.8, ["Hi", ["a", "b"], [1, 2, 3]]),
}
"""Values, and how often they are taken, that keep answers short, and models known: otherwise nearly all requests would end at their first check."""

PUBLISHED: Final = {
    "openai_chat.json": {"/chat/completions": "/v1/chat/completions", "/completions": "/v1/completions"},
    "anthropic.json": {
        "/v1/messages": "/v1/messages",
        "/v1/messages/count_tokens": "/v1/messages/count_tokens",
    },
    "openresponses.json": {"/responses": "/v1/responses", "/responses/compact": "/v1/responses/compact"},
}
"""Documents that llm-comply ships (OpenAI's own is MIT licensed), and their paths here."""


class Operation(NamedTuple):
    """A POST of an API document: what makes its bodies, and where they are sent."""

    path: str
    document: dict[str, Any]
    schema: dict[str, Any]


class Failure(NamedTuple):
    """A request that broke a promise."""

    path: str
    body: bytes
    what: str


class Report(NamedTuple):
    """Answers by path and status, and failures."""

    answers: Counter[tuple[str, int]]
    failures: list[Failure]


def published() -> list[Operation]:
    """The operations of the published documents that the edge serves."""
    found = []
    for file, paths in PUBLISHED.items():
        document = json.loads((resources.files("llm_comply") / "specs" / file).read_text())
        found += [Operation(here, document, _body(document, path)) for path, here in paths.items()]
    return found


def own(document: dict[str, Any]) -> list[Operation]:
    """All POST operations of our own document whose bodies are JSON: forms have tests of their own."""
    return [
        Operation(path, document, _body(document, path))
        for path, methods in document["paths"].items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    ]


def _body(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


async def send(url: str, operations: list[Operation], requests: int, seed: int) -> Report:
    """Send requests, round robin over the operations."""
    rng = random.Random(seed)
    report = Report(Counter(), [])
    bodies = iter(_bodies(operations, requests, rng))
    limits = httpx.Limits(max_connections=CONCURRENT)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as client:

        async def drain() -> None:
            for path, body in bodies:
                await _one(client, path, body, report)

        await asyncio.gather(*(drain() for _ in range(CONCURRENT)))
    return report


def _bodies(operations: list[Operation], requests: int, rng: random.Random) -> Any:
    samplers = [SchemaSampler(each.document, rng, CHOSEN) for each in operations]
    for number in range(requests):
        operation = operations[number % len(operations)]
        value = samplers[number % len(operations)].sample(operation.schema)
        yield operation.path, encode(value, rng)


async def _one(client: httpx.AsyncClient, path: str, body: bytes, report: Report) -> None:
    try:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        report.failures.append(Failure(path, body, f"{type(error).__name__}: {error}"))
        return
    report.answers[path, response.status_code] += 1
    what = _fault(response)
    if what:
        report.failures.append(Failure(path, body, what))


def _fault(response: httpx.Response) -> str:
    if response.status_code >= 500:
        return f"{response.status_code}: {response.text[:500]}"
    if response.status_code >= 400:
        if len(response.content) > ERROR_BYTES_MAX:
            return f"an error of {len(response.content)} bytes"
        if not isinstance(response.json().get("error"), dict):
            return f"an error without an error object: {response.text[:500]}"
    elif "event-stream" in response.headers["content-type"] and not response.content.endswith(b"\n\n"):
        return "a stream that was cut off"
    return ""
