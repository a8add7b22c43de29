"""A full disk: the fleet serves, says that it cannot record, and records again once there is room."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.clients.traffic import Traffic, recorded, stalled_s, traffic, until_async, until_health
from tests.support.processes.fleet import FleetProcess, fleet
from tests.support.servers.disk import disk
from tests.support.servers.nats import NatsServer

pytestmark = [pytest.mark.processes]

TOLD_S = 12.0
AGAIN_S = 25.0


async def _says_so(up: FleetProcess, sent: Traffic) -> str:
    """Health, metrics, log and `streams` tell it; requests are served. The log so far."""
    health = await until_health(up, 503, TOLD_S)
    assert health["status"] == "not persisting"
    await sent.until_answered(20)

    async def counted() -> bool:
        return await stalled_s(up) > 0

    await until_async(counted, "headwater_log_stalled_seconds above 0", 10)
    code, output = await up.command("streams")
    assert code != 0, output
    assert re.search(r"not persisting|takes no appends|stalled", output), output
    logged = up.log.read_text()
    assert re.search(r'"event": "[a-z_]*(persist|stall)[a-z_]*"', logged), logged[-3000:]
    assert (await until_health(up, 503, 1))["status"] == "not persisting"
    return logged


async def _well_again(up: FleetProcess, sent: Traffic) -> None:
    """Health, metrics and `streams` are as before, and what is served is in the log."""
    health = await until_health(up, 200, AGAIN_S)
    assert health["status"] == "ok"
    await sent.until_answered(20)
    async with up.client() as client:
        answer = await client.post(
            "/v1/completions", json={"model": "sim", "prompt": "And the end? " * 20, "max_tokens": 4}
        )
        assert answer.status_code == 200, answer.text
    await recorded(up, answer.headers["x-request-id"])

    async def resumed() -> bool:
        return await stalled_s(up) == 0

    # Each process notices by its own next append.
    await until_async(resumed, "headwater_log_stalled_seconds at 0", 10)
    code, output = await up.command("streams")
    assert code == 0, output


@asynccontextmanager
async def _busy(
    folder: Path, *flags: str, access: tuple[str, ...] = ()
) -> AsyncIterator[tuple[FleetProcess, Traffic]]:
    """A fleet that serves, and lost no request at the end."""
    async with fleet(folder, "--engine", "sim", *flags, access=access) as up:
        async with traffic(up) as sent:
            await sent.until_answered(10)
            yield up, sent
        assert sent.failed == []


@pytest.mark.timeout(150)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_a_full_disk_under_the_embedded_server(tmp_path: Path, times: int) -> None:
    """Told within seconds; once there is room, `up` restarts its server and the log goes on. Also the second time."""
    with disk(tmp_path / "data") as data:
        async with _busy(tmp_path) as (up, sent):
            [before] = up.pids("nats-server")
            data.fill()
            logged = await _says_so(up, sent)
            for _ in range(times - 1):
                data.free()
                await until_health(up, 200, AGAIN_S)
                data.fill()
                assert (await until_health(up, 503, TOLD_S))["status"] == "not persisting"
            data.free()
            await _well_again(up, sent)
            assert up.pids("nats-server") != [before]
            assert "edge_listening" not in up.log.read_text()[len(logged) :], "the edge was started again"


@pytest.mark.soak
@pytest.mark.timeout(150)
async def test_a_full_disk_under_an_external_server(tmp_path: Path) -> None:
    """The operator is told what to do; after the restart of that server the log goes on."""
    with disk(tmp_path / "disk") as data:
        server = NatsServer(tmp_path / "disk")
        await server.start()
        try:
            async with _busy(tmp_path, "--nats", server.url) as (up, sent):
                data.fill()
                logged = await _says_so(up, sent)
                assert re.search("restart (that|the|your|this) (external )?(nats-server|NATS server)", logged)
                data.free()
                code, output = await up.command("streams")
                assert code != 0, output
                assert "restart" in output
                server.stop()
                await server.restart()
                await _well_again(up, sent)
        finally:
            server.stop()


@pytest.mark.soak
@pytest.mark.timeout(100)
async def test_an_idle_fleet_on_a_full_disk(tmp_path: Path) -> None:
    """Without a request nothing is appended, and it is found all the same."""
    with disk(tmp_path / "data") as data:
        async with fleet(tmp_path, "--engine", "sim", "--workers", "1") as up:
            data.fill()
            assert (await until_health(up, 503, TOLD_S + 5))["status"] == "not persisting"
            data.free()
            assert (await until_health(up, 200, AGAIN_S))["status"] == "ok"
