"""Control of a real fleet: commands under load, the admin port, the audit, and an engine that dies."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headwater.actors.edge.saga.types import PLACE_S_MAX
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.control import worker_leases
from headwater.engines.sim.engine import SimEngine
from headwater.events.jetstream import Credentials
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.nats.config import Wanted
from headwater.ops.nats.server import open_ports
from headwater.ops.start import plan
from headwater.ops.start.sockets import free_port
from headwater.schemas.clock import SystemClock
from tests.support.engines.controlled import ControlledSim
from tests.support.processes.commands import ended
from tests.support.processes.fleet import FleetProcess, fleet, stream_text
from tests.system.test_least_rights import server

pytestmark = [pytest.mark.processes]

TOKEN = "a token of the tests".replace(" ", "-")
CHAT: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Where does a river begin? " * 5}],
    "ignore_eos": True,
    "seed": 5,
}


class Guest:
    """A worker in the test's own process that joins a fleet, and whose engine the test can break."""

    def __init__(self, world: Ports, actor: WorkerActor, engine: ControlledSim) -> None:
        self.world = world
        self.actor = actor
        self.engine = engine
        self.life = asyncio.create_task(actor.run(), name="guest")


@contextlib.asynccontextmanager
async def guest(up: FleetProcess, name: str = "guest", keys: Path | None = None) -> AsyncIterator[Guest]:
    """A guest that has joined; it leaves in an orderly way if it still lives at the end."""
    made, served = plan.make_engine(EngineProcess(worker=WorkerSettings(engine="sim")), name)
    assert isinstance(made, SimEngine)
    login = Credentials(nkey_file=str(keys / "worker.nk")) if keys is not None else None
    async with open_ports(up.nats, "default", name, kind="worker", credentials=login) as world:
        engine = ControlledSim(made._settings, SystemClock())
        one = Guest(world, WorkerActor(world, name, engine, served, drain_s=2.0), engine)
        async with asyncio.timeout(20):
            await one.actor.ready.wait()
        try:
            yield one
        finally:
            one.actor.stop()
            async with asyncio.timeout(20):
                await one.life


class Load:
    """Clients that ask without end, and count what they get.

    Each request has a cache of its own: else the holders of the prompt could be chosen each time, and the guest never.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.answers: list[tuple[str, str]] = []
        self._client = client
        self._salts = count()
        self._stopped = False

    async def ask(self) -> None:
        """One client."""
        while not self._stopped:
            body = {**CHAT, "max_tokens": 60, "cache_salt": str(next(self._salts))}
            text, finish, _ = await stream_text(self._client, body)
            self.answers.append((text, finish))

    @contextlib.asynccontextmanager
    async def on(self, clients: int = 4) -> AsyncIterator[None]:
        """Asking inside; behind it every answer was whole and the same."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self.ask())
            try:
                yield
            finally:
                self._stopped = True
        assert len(self.answers) > clients
        assert set(self.answers) == {(self.answers[0][0], "length")}


async def ctl(up: FleetProcess, *words: str, code: int = 0) -> str:
    """A control command as a user gives it."""
    got, output = await up.command("ctl", *words)
    assert got == code, output
    return output


async def audit(up: FleetProcess) -> list[tuple[str, str, str, int]]:
    """What the log has of it."""
    code, output = await up.command("log", "--audit", "--json")
    assert code == 0, output
    found = [msgspec.json.decode(line) for line in output.splitlines() if line.startswith("{")]
    return [(one["worker"], one["command"], one["by"], one["status"]) for one in found]


async def test_no_request_fails_whatever_one_worker_is_told(tmp_path: Path) -> None:
    """Sleep, wake, pause, drain, another role, a stop: clients see nothing of it, and the log has all of it."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "1") as up, up.client() as client:
        load = Load(client)
        async with guest(up) as one, load.on():
            epoch = one.actor.epoch
            commands = [
                ("sleep", "--level", "2", "--drain-timeout", "0.2"),
                ("wake",),
                ("pause", "--mode", "keep"),
                ("resume",),
                ("pause", "--mode", "abort"),
                ("resume",),
                ("drain",),
                ("role", "decode"),
                ("role", "both"),
                ("resume",),
                ("clear-kv",),
            ]
            for words in commands:
                await ctl(up, "guest", *words, "--by", "tester")
                before = len(load.answers)
                async with asyncio.timeout(20):
                    while len(load.answers) <= before:
                        await asyncio.sleep(0.01)
            await ctl(up, "guest", "wake", "--by", "tester", code=1)
            assert one.actor.epoch == epoch
            listed = await ctl(up, "list")
            assert [line.split()[:4:3] for line in listed.splitlines()[2:]] == [
                ["guest", "ready"],
                ["worker-0", "ready"],
            ]
        done = [("guest", words[0], "tester", 200) for words in commands]
        assert await audit(up) == [*done, ("guest", "wake", "tester", 409)]
        code, output = await up.command("log", "--audit")
        assert code == 0
        assert '{"level":2,"within_s":0.2}' in output


async def test_all_workers_at_once_and_one_for_good(tmp_path: Path) -> None:
    """A fleet that is drained answers nobody; one that was told to stop is not started again."""
    async with fleet(tmp_path, "--engine", "sim") as up, up.client() as client:
        output = await ctl(up, "--all", "drain")
        assert "worker-0: drained" in output
        assert "worker-1: drained" in output
        resuming = asyncio.create_task(ctl(up, "--all", "resume"))
        waiting = []
        while not resuming.done():
            waiting.append(asyncio.create_task(timed_answer(client)))
            await asyncio.wait({resuming}, timeout=1.0)
        await resuming
        for status, seconds in await asyncio.gather(*waiting):
            # On a busy machine the command itself may take longer to start than a request may wait.
            assert status == 200 or seconds >= PLACE_S_MAX, "it waited for a worker"
        assert status == 200
        assert "--lora-sources" in await ctl(up, "worker-0", "load-lora", "a", "b", code=1)
        assert "no worker worker-7" in await ctl(up, "worker-7", "status", code=1)
        await ctl(up, "worker-0", "stop")
        async with asyncio.timeout(20):
            while up.pids("--name worker-0"):
                await asyncio.sleep(0.05)
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})).status_code == 200
        assert "child_restarting" not in up.log.read_text()
        assert [one[1] for one in await audit(up)].count("drain") == 2


async def test_control_over_http_with_a_key_of_its_own(tmp_path: Path) -> None:
    """Log-ins everywhere: the admin's process may control and look at leases, and the server denies nobody."""
    file = tmp_path / "tokens"
    file.write_text(f"ops {TOKEN}\n")
    file.chmod(0o600)
    port = free_port(0)
    async with server(tmp_path, Wanted("default")) as nats:
        access = ("--nats-keys-dir", str(tmp_path))
        flags = ("--engine", "sim", "--workers", "1", "--nats", nats.url)
        http = ("--admin-port", str(port), "--admin-token-file", str(file))
        async with fleet(tmp_path, *flags, *http, access=access) as up, up.client() as client:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as admin:
                assert (await admin.get("/admin/workers")).status_code == 401
                admin.headers["authorization"] = f"Bearer {TOKEN}"
                [one] = (await admin.get("/admin/workers")).json()["workers"]
                assert (one["worker"], one["state"]) == ("worker-0", "ready")
                drained = await admin.post("/admin/workers/worker-0/drain", headers={"x-headwater-by": "ann"})
                assert drained.status_code == 200
                assert (await admin.get("/admin/workers/worker-0")).json()["state"] == "draining"
                wrong = await admin.post("/admin/workers/worker-0/role", json={"role": "boss"})
                assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_request_error")
                assert (await admin.post("/admin/workers/worker-0/resume")).status_code == 200
            async with guest(up, keys=tmp_path):
                await ctl(up, "guest", "sleep", "--by", "op")
                await ctl(up, "guest", "wake", "--by", "op")
            answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
            assert answer.status_code == 200
            assert await audit(up) == [
                ("worker-0", "drain", "ann (token ops)", 200),
                ("worker-0", "role", "token ops", 400),
                ("worker-0", "resume", "token ops", 200),
                ("guest", "sleep", "op", 200),
                ("guest", "wake", "op", 200),
            ]
        assert "denied" not in up.log.read_text()


async def test_an_admin_port_without_a_token_does_not_open(tmp_path: Path) -> None:
    """`up` says so before it starts anything."""
    end = await ended("up", "--engine", "sim", "--admin-port", "1", "--data-dir", str(tmp_path))
    assert end.code == 2
    assert "--admin-token-file" in end.told()


async def timed_answer(client: httpx.AsyncClient) -> tuple[int, float]:
    """Status of a request's answer, and the seconds until it came."""
    began = time.monotonic()
    answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})
    return answer.status_code, time.monotonic() - began


async def lease_gone(world: Ports, worker: str, within_s: float) -> None:
    """Wait until a worker's lease is given back."""
    async with asyncio.timeout(within_s):
        while worker in await worker_leases(world):
            await asyncio.sleep(0.01)


async def test_a_dead_engine_costs_no_request(tmp_path: Path) -> None:
    """Its own check finds it, or its process is killed: the lease is given back, requests go on."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "2") as up, up.client() as client:
        async with open_ports(up.nats, "default", "eye") as eye:
            load = Load(client)
            async with load.on():
                async with guest(up) as one:
                    async with asyncio.timeout(20):
                        while not len(one.actor.inflight):
                            await asyncio.sleep(0.01)
                    one.engine.dead = "its process was killed by SIGKILL"
                    await lease_gone(eye, "guest", 10.0)
                    reason = await one.life
                    assert "its process was killed by SIGKILL" in reason
                up.kill("--name worker-0")
                await lease_gone(eye, "worker-0", 10.0)
                await up.until(
                    "two workers again",
                    lambda stats: (
                        sum(s["name"] == "headwater-worker" and s["state"] == "ready" for s in stats) == 2
                    ),
                )
        events = await _left(up)
        assert events["guest"] == "EngineDied: its process was killed by SIGKILL"


async def _left(up: FleetProcess) -> dict[str, str]:
    """Why workers left, by name."""
    from headwater.schemas.events import WorkerLeft

    found: dict[str, str] = {}
    async with open_ports(up.nats, "default", "eye") as world:
        log = await world.pool_log("sim-b16")
        async for piece in log.read(0, follow=False):
            for record in piece.records:
                found |= {e.worker: e.reason for e in record.batch.events if isinstance(e, WorkerLeft)}
    return found
