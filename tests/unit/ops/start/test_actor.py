"""An actor's process ends when it is asked to, wherever it is; and leases of dead ones are revoked on their machine alone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.lease import take
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import LeaseTable
from headwater.events.memory import MemoryTable
from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.sections import NatsSettings
from headwater.ops.start import actor as process
from headwater.ops.start.actor import Host, revoke_leases_of, run_one
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world

Stage = Literal["connecting", "making", "starting"]


class Endless(Actor):
    """Starts for ever."""

    kind = "worker"

    def __init__(self, ports: Ports, reached: asyncio.Event) -> None:
        super().__init__(ports, "w")
        self._reached = reached
        self.closed = False

    async def start(self) -> None:
        self._reached.set()
        await asyncio.Event().wait()

    async def drain(self) -> None:
        raise AssertionError("nothing is to be drained")

    async def close(self) -> None:
        self.closed = True

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("stage", ["connecting", "making", "starting"])
async def test_a_process_that_is_not_ready_yet_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, restarts: bool
) -> None:
    """Exit code 0, as after a drain: it ended because it was asked to. Its connection is closed."""
    reached, made, closed = asyncio.Event(), list[Endless](), asyncio.Event()

    @asynccontextmanager
    async def ports_of(*_: Any, **__: Any) -> AsyncIterator[Ports]:
        try:
            if stage == "connecting":
                reached.set()
                await asyncio.Event().wait()
            yield memory_world(ManualClock())
        finally:
            closed.set()

    async def make(ports: Ports) -> Actor:
        if stage == "making":
            reached.set()
            await asyncio.Event().wait()
        made.append(Endless(ports, reached))
        return made[0]

    monkeypatch.setattr(process, "ports_of", ports_of)
    monkeypatch.setattr(process, "compile_kernels", lambda say: None)
    stop = asyncio.Event()
    host = Host(NatsSettings(), MetricsSettings())
    running = asyncio.ensure_future(run_one(host, "worker", "w", make, stop, restarts=restarts))
    try:
        async with asyncio.timeout(10):
            await reached.wait()
            stop.set()
            assert await running == 0
    finally:
        running.cancel()
    assert closed.is_set()
    assert all(one.closed for one in made)


@pytest.mark.parametrize(("where", "revoked"), [("here", True), ("elsewhere", False)])
async def test_a_process_of_another_machine_keeps_its_lease(
    monkeypatch: pytest.MonkeyPatch, where: str, revoked: bool
) -> None:
    """In containers every process has the same few ids."""
    clock = ManualClock()
    table = MemoryTable(clock)
    monkeypatch.setattr("os.getpid", lambda: 7)
    monkeypatch.setattr(socket, "gethostname", lambda: where)
    await take(table, "worker", "worker-0", clock, ids="i1")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert await revoke_leases_of(table, "worker", "worker-0", 7) is revoked
    assert (await LeaseTable(table).get("worker", "worker-0") is None) is revoked
