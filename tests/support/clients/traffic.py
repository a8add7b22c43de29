"""Requests that go on while something is broken, and what became of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.support.processes.fleet import FleetProcess, stream_text

SHORT: dict[str, Any] = {"model": "sim", "prompt": "Where does a river begin? ", "max_tokens": 4}


class Traffic:
    """One short request after the other, of several clients at once."""

    def __init__(self) -> None:
        self.answered = 0
        self.failed: list[str] = []

    async def until_answered(self, more: int, within_s: float = 20) -> None:
        """Wait for so many more answers."""
        wanted = self.answered + more
        await until(lambda: self.answered >= wanted, f"{more} more answers", within_s)

    async def client(self, client: httpx.AsyncClient, every_s: float) -> None:
        """One client, until it is cancelled."""
        while True:
            began = time.monotonic()
            try:
                answer = await client.post("/v1/completions", json=SHORT)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))
            else:
                if answer.status_code == 200:
                    self.answered += 1
                else:
                    self.failed.append(f"{answer.status_code} {answer.text[:300]}")
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))


@asynccontextmanager
async def traffic(up: FleetProcess, *, clients: int = 4, every_s: float = 0.4) -> AsyncIterator[Traffic]:
    """Send requests until the block ends. The requests under way then are given up."""
    made = Traffic()
    async with up.client() as client:
        tasks = [asyncio.create_task(made.client(client, every_s)) for _ in range(clients)]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def answer(
    client: httpx.AsyncClient, body: dict[str, Any], on_text: Callable[[int], None] | None = None
) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens of a streamed chat: what must not differ from an undisturbed run."""
    text, finish, usage = await stream_text(client, body, on_text)
    return text, finish, int(usage["completion_tokens"])


async def until(holds: Callable[[], bool], what: str, within_s: float) -> None:
    """Wait until something is so."""

    async def told() -> bool:
        return holds()

    await until_async(told, what, within_s)


async def until_async(holds: Callable[[], Awaitable[bool]], what: str, within_s: float) -> None:
    """Wait until an asynchronous question is answered with yes."""
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.1)


async def until_health(up: FleetProcess, code: int, within_s: float) -> dict[str, Any]:
    """Wait for this answer of /health; the document."""
    deadline = time.monotonic() + within_s
    seen: object = None
    async with up.client() as client:
        while True:
            try:
                answer = await client.get("/health", timeout=5)
                seen = (answer.status_code, answer.text)
                if answer.status_code == code:
                    document: dict[str, Any] = answer.json()
                    return document
            except httpx.HTTPError as error:
                seen = error
            assert time.monotonic() < deadline, f"/health was not {code} within {within_s:g} s: {seen}"
            await asyncio.sleep(0.1)


async def stalled_s(up: FleetProcess) -> float:
    """The edge's metric headwater_log_stalled_seconds, the largest over its labels; -1 if there is none."""
    async with up.client() as client:
        page = (await client.get("/metrics")).text
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith("headwater_log_stalled_seconds") and not line.startswith("#")
    ]
    return max(found, default=-1.0)


async def recorded(up: FleetProcess, request: str, within_s: float = 10) -> None:
    """Wait until both logs have a request: its decision, and its life until the end."""
    output = ""

    async def whole() -> bool:
        nonlocal output
        code, output = await up.command("explain", request)
        return code == 0 and len(output.splitlines()) > 3

    deadline = time.monotonic() + within_s
    while not await whole():
        assert time.monotonic() < deadline, f"{request} is not in the log: {output}"
    from headwater.ops.nats.server import open_ports

    async with open_ports(up.nats, "default", "test") as world:
        async for piece in world.requests.read(0, follow=False):
            for record in piece.records:
                if any(getattr(event, "request", "") == request for event in record.batch.events):
                    return
    raise AssertionError(f"{request} is not in the request log")
