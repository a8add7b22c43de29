"""Injection of faults, and their end."""

import asyncio
import contextlib
import random

from headwater.events.errors import LogRefused
from headwater.ops.sim.faults import Fault
from headwater.ops.sim.fleet import POOL, SimFleet
from headwater.ops.sim.network import NetworkTrace

ZOMBIE_S = 2.0
"""How long a process that lost its name runs before it is killed."""


class Injector:
    """Injects a schedule of faults. `whole` becomes False once a part of the pool log is purged; `altered`: True once
    a message was altered."""

    def __init__(self, fleet: SimFleet, faults: list[Fault], trace: NetworkTrace) -> None:
        self.whole = True
        self.altered = False
        self._fleet = fleet
        self._faults = faults
        self._trace = trace

    async def run(self) -> None:
        """Inject all faults; returns when the last one has ended."""
        loop = self._fleet.loop
        tasks = []
        for fault in sorted(self._faults, key=lambda one: one.at_s):
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            tasks.append(loop.create_task(self._play(fault), name=f"fault {fault.kind}"))
        await asyncio.gather(*tasks)

    async def _play(self, fault: Fault) -> None:
        self._trace("fault", fault.target or "-", str(fault))
        begin = getattr(self, f"_{fault.kind}")
        await begin(fault)
        self._trace("over", fault.target or "-", fault.kind)

    async def _drop(self, fault: Fault) -> None:
        self._fleet.network.drop += fault.amount
        await asyncio.sleep(fault.for_s)
        self._fleet.network.drop -= fault.amount

    async def _duplicate(self, fault: Fault) -> None:
        self._fleet.network.duplicate += fault.amount
        await asyncio.sleep(fault.for_s)
        self._fleet.network.duplicate -= fault.amount

    async def _delay(self, fault: Fault) -> None:
        self._fleet.network.delay_s += fault.amount
        await asyncio.sleep(fault.for_s)
        self._fleet.network.delay_s -= fault.amount

    async def _partition(self, fault: Fault) -> None:
        process = self._fleet.processes[fault.target]
        process.cut()
        await asyncio.sleep(fault.for_s)
        process.heal()

    async def _crash(self, fault: Fault) -> None:
        if not self._fleet.processes[fault.target].alive:
            return
        await self._fleet.kill(fault.target)
        await asyncio.sleep(fault.for_s)
        self._fleet.start(fault.target)

    async def _lease_loss(self, fault: Fault) -> None:
        process = fault.target.partition("-")[0]
        kind = {"engine": "worker", "encode": "worker"}.get(process, process)
        await self._fleet.store.leases.delete(f"{kind}.{fault.target}")

    async def _leases_lost(self, _: Fault) -> None:
        """Delete and re-create the lease bucket."""
        self._fleet.store.leases.replace()

    async def _actor_failure(self, fault: Fault) -> None:
        """Fail a task of the actor; its process restarts the actor."""
        actor = self._fleet.actors.get(fault.target)
        process = self._fleet.processes[fault.target]
        if actor is None or not process.alive or not actor.ready.is_set():
            return

        async def fail() -> None:
            raise LogRefused(f"injected: {fault}")

        with contextlib.suppress(RuntimeError):
            actor.spawn(fail(), "injected")

    async def _pause(self, fault: Fault) -> None:
        process = self._fleet.processes[fault.target]
        process.group.pause()
        await asyncio.sleep(fault.for_s)
        process.group.resume(self._fleet.loop)

    async def _zombie(self, fault: Fault) -> None:
        """Suspend a process until another has taken its name, then resume it."""
        fleet, old = self._fleet, self._fleet.processes[fault.target]
        if not old.alive:
            return
        old.group.pause()
        await asyncio.sleep(fault.for_s / 2)
        if fleet.processes[fault.target] is old and old.alive:
            fleet.start(fault.target)
        await asyncio.sleep(fault.for_s / 2)
        old.group.resume(fleet.loop)
        if fleet.processes[fault.target] is not old:
            await asyncio.sleep(ZOMBIE_S)
            fleet.stuck += await old.kill()

    async def _clock_jump(self, fault: Fault) -> None:
        self._fleet.processes[fault.target].wall_offset_s += fault.amount

    async def _log_unavailable(self, fault: Fault) -> None:
        self._fleet.store.unavailable += 1
        await asyncio.sleep(fault.for_s)
        self._fleet.store.unavailable -= 1

    async def _answer_lost(self, fault: Fault) -> None:
        self._fleet.store.answer_lost += fault.amount
        await asyncio.sleep(fault.for_s)
        self._fleet.store.answer_lost -= fault.amount

    async def _disk_full(self, fault: Fault) -> None:
        self._fleet.store.full += 1
        await asyncio.sleep(fault.for_s)
        self._fleet.store.full -= 1

    async def _slow_reader(self, fault: Fault) -> None:
        process = self._fleet.processes[fault.target]
        process.slow_reader_s += fault.amount
        await asyncio.sleep(fault.for_s)
        process.slow_reader_s -= fault.amount

    async def _purge(self, fault: Fault) -> None:
        log = self._fleet.store.pool(POOL)
        first, last, *_ = await log.bounds()
        log.purge(first + int((last - first) * fault.amount))
        self.whole = False

    async def _replace(self, _: Fault) -> None:
        self._fleet.store.pool(POOL).replace()
        self.whole = False

    async def _alter(self, fault: Fault) -> None:
        """Flip a bit of one stored message."""
        log = self._fleet.store.pool(POOL)
        first, last, *_ = await log.bounds()
        if last < first:
            return
        position = first + int((last - first) * fault.amount)
        data = bytearray(log.raw(position).data)
        draw = random.Random(f"{fault}")
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
        log.alter(position, bytes(data))
        # Routers that read it before folded the original.
        self.whole, self.altered = False, True
