"""What breaks and what does not: kill -9 under running streams, with the simulated engine."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.fleet import FleetProcess, fleet, shared_fleet, stream_text

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Tell me a long story about a river. " * 10}],
    "max_tokens": 300,
    "ignore_eos": True,
    "seed": 11,
}


up = shared_fleet("--engine", "sim")
"""Two simulated workers. Each test waits first until what the one before has killed is back."""


async def _with_a_kill(
    up: FleetProcess, what: str, streams: int = 4
) -> list[tuple[str, str, dict[str, Any]]]:
    """Run streams; once the first is well under way, kill."""
    killed = False

    def on_text(chunks: int) -> None:
        nonlocal killed
        if chunks >= 20 and not killed:
            killed = True
            up.kill(what)

    async with up.client() as client, asyncio.timeout(60):
        answers = await asyncio.gather(*(stream_text(client, BODY, on_text) for _ in range(streams)))
    assert killed
    return answers


async def _expected(up: FleetProcess) -> str:
    async with up.client() as client:
        text, finish, usage = await stream_text(client, BODY)
    assert (finish, usage["completion_tokens"]) == ("length", 300)
    return text


async def test_a_killed_worker_costs_no_client_its_answer(up: FleetProcess) -> None:
    """The request moves with the tokens so far: each client sees one unbroken answer, and the worker returns."""
    await up.until_whole()
    expected = await _expected(up)
    async with up.client() as client:
        answer = await client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1})
    # The prompt's blocks are there, so the first of the streams goes there.
    worker = answer.headers["x-headwater-worker"]
    for text, finish, usage in await _with_a_kill(up, f"--name {worker}"):
        assert text == expected
        assert finish == "length"
        assert usage["completion_tokens"] == 300
    await up.until_whole()


async def test_the_only_worker_may_die(tmp_path: Path) -> None:
    """With nowhere else to go the request waits for the worker's next life."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "1") as up:
        expected = await _expected(up)
        for text, _, _ in await _with_a_kill(up, "--name worker-0", streams=2):
            assert text == expected


@pytest.mark.parametrize("victim", [" router ", "nats-server"])
async def test_streams_survive_a_killed_router_or_server(up: FleetProcess, victim: str) -> None:
    """New requests wait for the router's restart; nats-server is restarted on its store: what was lost on the way is asked for again."""
    await up.until_whole()
    expected = await _expected(up)
    before = await _decisions(up)
    for text, _, _ in await _with_a_kill(up, victim):
        assert text == expected
    assert await _expected(up) == expected
    assert before <= await _decisions(up)


async def test_a_killed_edge_is_back_for_new_requests(up: FleetProcess) -> None:
    """Its own streams end with it; the address serves again, and its workers are free."""
    await up.until_whole()
    expected = await _expected(up)
    up.kill(" edge ")
    # Where everything shares two cores, a new process takes its time.
    async with asyncio.timeout(90):
        while True:
            try:
                assert await _expected(up) == expected
                break
            except (OSError, httpx.TransportError):
                await asyncio.sleep(0)


async def _decisions(up: FleetProcess) -> set[str]:
    """Requests that have a decision in the log."""
    from headwater.actors.runtime.tables import CardTable
    from headwater.ops.nats.server import open_ports
    from headwater.schemas.routing import Decision

    found: set[str] = set()
    async with open_ports(up.nats, "default", "test") as world:
        log = await world.pool_log((await CardTable(world.cards).pools())[0])
        async for piece in log.read(0, follow=False):
            for record in piece.records:
                found |= {event.request for event in record.batch.events if isinstance(event, Decision)}
    return found
