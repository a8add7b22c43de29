"""A store that is slow, hangs or cannot be written: no request is lost, and the fleet tells what it does not record."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.traffic import answer, recorded, traffic, until_health
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.disk import immutable
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.soak, pytest.mark.processes]

LONG: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Tell me a long story about a river. " * 4}],
    "max_tokens": 1_000,
    "ignore_eos": True,
    "seed": 5,
}
PAUSE_S = 4.0
STREAMS = 4


async def _pauses(server: NatsServer, every_s: float) -> None:
    """Stop the server for a while again and again, until cancelled."""
    try:
        while True:
            server.pause()
            await asyncio.sleep(PAUSE_S)
            server.resume()
            await asyncio.sleep(every_s)
    finally:
        server.resume()


@pytest.mark.timeout(150)
async def test_a_server_that_hangs_again_and_again(tmp_path: Path) -> None:
    """Four seconds of every seven without a server: each stream is whole, and each short request is answered."""
    (tmp_path / "nats").mkdir()
    server = NatsServer(tmp_path / "nats")
    await server.start()
    try:
        async with fleet(tmp_path, "--engine", "sim", "--nats", server.url) as up, up.client() as client:
            expected = await answer(client, LONG)
            hangs = asyncio.create_task(_pauses(server, 3.0))
            try:
                async with traffic(up, clients=2) as sent:
                    async with asyncio.timeout(90):
                        answers = await asyncio.gather(*(answer(client, LONG) for _ in range(STREAMS)))
            finally:
                hangs.cancel()
                await asyncio.gather(hangs, return_exceptions=True)
            assert answers == [expected] * STREAMS
            assert sent.failed == []
            await until_health(up, 200, 20)
            await _records(up)
    finally:
        server.stop()


async def _records(up: FleetProcess) -> None:
    """A request from now on is in the log."""
    async with up.client() as client:
        last = await client.post(
            "/v1/completions", json={"model": "sim", "prompt": "And the end? " * 20, "max_tokens": 4}
        )
        assert last.status_code == 200, last.text
    await recorded(up, last.headers["x-request-id"])


@pytest.mark.timeout(120)
async def test_a_store_that_becomes_read_only(tmp_path: Path) -> None:
    """Its files refuse every write: told as for a full disk, and over by itself once they can be written."""
    async with fleet(tmp_path, "--engine", "sim") as up, traffic(up) as sent:
        await sent.until_answered(10)
        with immutable(tmp_path / "data" / "nats" / "jetstream"):
            assert (await until_health(up, 503, 12))["status"] == "not persisting"
            await sent.until_answered(20)
            code, output = await up.command("streams")
            assert code != 0, output
        assert (await until_health(up, 200, 25))["status"] == "ok"
        await _records(up)
        assert sent.failed == []
