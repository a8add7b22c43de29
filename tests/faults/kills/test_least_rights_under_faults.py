"""Kills under least permissions: what each life does anew is permitted to it, and nothing is lost."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted
from headwater.ops.start.sockets import free_port
from tests.support.clients.traffic import answer, until_async, until_health
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.soak, pytest.mark.processes]

LONG: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Tell me a long story about a river. " * 4}],
    "max_tokens": 800,
    "ignore_eos": True,
    "seed": 5,
}
STREAMS = 4


@pytest.mark.timeout(180)
async def test_kills_under_least_permissions(tmp_path: Path) -> None:
    """Worker, router, server and edge in turn: every stream but those of the killed edge is whole."""
    port = free_port(0)
    nats_config.write(Wanted("default")._replace(port=port, store=str(tmp_path / "js")), tmp_path)
    server = NatsServer(tmp_path, port=port, config=tmp_path / "nats.conf")
    await server.start()
    access = ("--nats-keys-dir", str(tmp_path))
    try:
        async with fleet(tmp_path, "--engine", "sim", "--nats", server.url, access=access) as up:
            async with up.client() as client:
                expected = await answer(client, LONG)
                for what in ("--name worker-0", " router ", "nats-server"):
                    assert await _through_a_kill(up, client, server, what) == [expected] * STREAMS, what
                    await _whole(up, client)
                killed = up.kill(" edge ")
                await until_health(up, 200, 40)
                assert killed not in up.pids(" edge ")
                answers = await asyncio.gather(*(answer(client, LONG) for _ in range(STREAMS)))
                assert answers == [expected] * STREAMS
                last = await client.post("/v1/completions", json={"model": "sim", "prompt": "x" * 400})
                assert last.status_code == 200, last.text
            code, output = await up.command("explain", last.headers["x-request-id"])
            assert code == 0, output
            code, output = await up.command("streams")
            assert code == 0, output
        logged = up.log.read_text()
        assert "nats_permission_denied" not in logged
        assert "denied" not in logged
        assert server.violations() == []
    finally:
        server.stop()


async def _through_a_kill(
    up: FleetProcess, client: httpx.AsyncClient, server: NatsServer, what: str
) -> list[tuple[str, str, int]]:
    """Streams, in the middle of which something is killed."""
    reached = asyncio.Event()

    def on_text(chunks: int) -> None:
        if chunks >= 50:
            reached.set()

    running = [asyncio.create_task(answer(client, LONG, on_text)) for _ in range(STREAMS)]
    async with asyncio.timeout(60):
        await reached.wait()
        if what == "nats-server":
            server.kill()
            await server.restart()
        else:
            up.kill(what)
        return await asyncio.gather(*running)


async def _whole(up: FleetProcess, client: httpx.AsyncClient) -> None:
    """Wait until both workers and the router are there again: the next kill is of a whole fleet."""

    async def whole() -> bool:
        health = (await client.get("/health")).json()
        processes = [up.pids(what) for what in ("--name worker-0", "--name worker-1", " router ")]
        return all(processes) and sum(health.get("workers", {}).values()) == 2

    await until_async(whole, "a whole fleet", 40)
    done = await client.post("/v1/completions", json={"model": "sim", "prompt": "x" * 400, "max_tokens": 2})
    assert done.status_code == 200, done.text
