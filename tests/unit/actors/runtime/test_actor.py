"""The lifecycle of an actor: whatever it does when it is asked to stop, it ends, and releases what it holds."""

import asyncio
from typing import Any

import pytest

from headwater.actors.runtime import lease
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.engines.engine import EngineUnavailable
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world


class Starting(Actor):
    """Its start takes until somebody says so."""

    kind = "worker"

    def __init__(self, ports: Ports, name: str = "w") -> None:
        super().__init__(ports, name)
        self.begun = asyncio.Event()
        self.may_start = asyncio.Event()
        self.did: list[str] = []

    async def start(self) -> None:
        self.spawn(asyncio.Event().wait(), "loop")  # type: ignore[arg-type]
        self.begun.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.did.append("cancelled")
            raise

    async def drain(self) -> None:
        self.did.append("drained")

    async def close(self) -> None:
        self.did.append("closed")

    def stats(self) -> dict[str, Any]:
        return {}


class Waiting(Starting):
    """Waits for a lease that another incarnation holds."""

    async def start(self) -> None:
        self.begun.set()
        await lease.take(self.ports.leases, "worker", self.name, self.ports.clock)


class Failing(Starting):
    """Cannot start."""

    async def start(self) -> None:
        raise EngineUnavailable("no such engine")


async def test_an_actor_that_is_stopped_while_it_starts_ends_at_once() -> None:
    """It has nothing to drain. Its resources are released."""
    actor = Starting(memory_world(ManualClock()))
    running = asyncio.ensure_future(actor.run())
    await actor.begun.wait()
    actor.stop()
    async with asyncio.timeout(10):
        assert await running == ""
    assert actor.did == ["cancelled", "closed"]
    assert not actor.ready.is_set()


async def test_an_actor_that_waits_for_its_lease_ends_at_once() -> None:
    """The lease stays with its holder."""
    ports = memory_world(ManualClock())
    held = await lease.take(ports.leases, "worker", "w", ports.clock)
    actor = Waiting(ports)
    running = asyncio.ensure_future(actor.run())
    await actor.begun.wait()
    actor.stop()
    async with asyncio.timeout(10):
        assert await running == ""
    assert actor.did == ["closed"]
    entry = await ports.leases.get("worker.w")
    assert entry is not None
    assert f'"epoch":{held.epoch}'.encode() in entry.value  # type: ignore[operator]


async def test_an_actor_that_was_stopped_before_it_ran_does_not_start() -> None:
    """The signal came while it was made."""
    actor = Starting(memory_world(ManualClock()))
    actor.stop()
    async with asyncio.timeout(10):
        assert await actor.run() == ""
    assert "drained" not in actor.did
    assert actor.did[-1] == "closed"


async def test_an_actor_that_has_started_drains() -> None:
    """Stopped later, it finishes what it began."""
    actor = Starting(memory_world(ManualClock()))
    running = asyncio.ensure_future(actor.run())
    actor.may_start.set()
    await actor.ready.wait()
    actor.stop()
    assert await running == ""
    assert actor.did == ["drained", "closed"]


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_start_that_fails_is_told(stopped: bool) -> None:
    """Also one that fails in the moment in which it is stopped."""
    actor = Failing(memory_world(ManualClock()))
    running = asyncio.ensure_future(actor.run())
    if stopped:
        await asyncio.sleep(0)
        actor.stop()
    reason = await running
    assert stopped or "no such engine" in reason
    assert actor.did[-1] == "closed"
