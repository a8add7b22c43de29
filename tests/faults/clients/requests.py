"""Requests to the fleet of this folder, and what must be so when all of them have ended."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.support.clients import raw_http
from tests.support.processes.fleet import FleetProcess

HEADER_S = 2.0
BODY_S = 2.0
"""Well above what a process of a loaded machine may have to wait for the processor."""

SERVED_S = 15.0
"""What a small request may take next to hostile clients, on a loaded machine as well (5.1 s were seen with a load of 20 on two cores)."""

SMALL: dict[str, Any] = {"model": "sim", "prompt": "hello there", "max_tokens": 4, "ignore_eos": True}
LONG: dict[str, Any] = {**SMALL, "max_tokens": 20_000}


def encoded(body: dict[str, Any], **more: Any) -> bytes:
    """A body as bytes."""
    return msgspec.json.encode({**body, **more})


async def ask(url: str, *, source: str = "127.0.0.2", within_s: float = 20.0) -> float:
    """A small request on a connection of its own; seconds until its whole answer was there."""
    began = time.monotonic()
    async with raw_http.connection(url, source=source) as client:
        await client.send(raw_http.request(encoded(SMALL)))
        answer = await client.answer(within_s)
    assert answer.status == 200, answer.body
    assert msgspec.json.decode(answer.body)["usage"]["completion_tokens"] == 4
    return time.monotonic() - began


async def until_idle(up: FleetProcess, within_s: float = 10.0) -> None:
    """No request, no stream and nothing in an engine."""
    await up.until(
        "nothing is left of what clients gave up",
        lambda stats: (
            not any(
                one.get("active_requests") or one.get("streams") or one.get("running") or one.get("waiting")
                for one in stats
            )
        ),
        within_s=within_s,
    )


def edge(up: FleetProcess) -> int:
    """Process id of the edge."""
    [pid] = up.pids(" edge ")
    return pid


def edge_bytes(up: FleetProcess) -> int:
    """Resident memory of the edge."""
    return int(Path(f"/proc/{edge(up)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def refusal(client: raw_http.Connection, *statuses: int, within_s: float = 5.0) -> dict[str, Any]:
    """The error of a refusal, after which the connection is closed."""
    answer = await client.answer(within_s)
    assert answer.status in statuses, (answer.status, answer.body[:300])
    assert answer.headers["content-type"].startswith("application/json")
    return answer.error()


async def begin_stream(client: raw_http.Connection) -> None:
    """Send a long streamed request, and return in the middle of its answer."""
    await client.send(raw_http.request(encoded(LONG, stream=True)))
    status, _ = await client.head()
    assert status == 200
    seen = 0
    async for chunk in client.chunks():
        seen += chunk.count(b"data: {")
        if seen >= 5:
            return
