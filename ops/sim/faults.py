"""Faults as data (kind, time, duration and target), determined by a seed; their injection, and their end."""

import asyncio
import contextlib
import random
from typing import Final, Literal

import msgspec

from headwater.actors.runtime import lease
from headwater.events.ports import LogRefused
from headwater.ops.sim.fleet import POOL, SimFleet
from headwater.ops.sim.network import NetworkTrace

Kind = Literal[
    "drop",
    "duplicate",
    "delay",
    "partition",
    "crash",
    "lease_loss",
    "leases_lost",
    "actor_failure",
    "pause",
    "zombie",
    "clock_jump",
    "log_unavailable",
    "answer_lost",
    "disk_full",
    "slow_reader",
    "purge",
    "replace",
    "alter",
]

SHARES: Final[dict[Kind, int]] = {
    "drop": 3,
    "duplicate": 2,
    "delay": 3,
    "partition": 3,
    "crash": 6,
    "lease_loss": 2,
    "leases_lost": 1,
    "actor_failure": 2,
    "pause": 3,
    "zombie": 3,
    "clock_jump": 1,
    "log_unavailable": 2,
    "answer_lost": 2,
    "disk_full": 2,
    "slow_reader": 2,
    "purge": 1,
    "replace": 1,
    "alter": 1,
}
"""Relative frequency of each kind."""

FROM_S, UNTIL_S = 3.0, 24.0
"""Faults start within this time and end at most 3 s after it."""

LASTING_S_MAX = 6.0
LEASE_S: Final = lease.TTL_S


class Fault(msgspec.Struct, frozen=True):
    """A fault from `at_s` for `for_s` seconds.

    `target` is a process, or empty for faults that affect all. `amount` is a probability (drop, duplicate, answer_lost),
    seconds (delay, clock_jump, slow_reader) or a share of the log (purge, alter).
    """

    kind: Kind
    at_s: float
    for_s: float = 0.0
    target: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at_s:6.2f} s  {self.kind}"]
        if self.target:
            parts.append(self.target)
        if self.amount:
            parts.append(f"{self.amount:g}")
        if self.for_s:
            parts.append(f"for {self.for_s:.2f} s")
        return " ".join(parts)


def schedule(
    seed: int, engines: list[str], routers: list[str], edges: list[str], encoders: list[str]
) -> list[Fault]:
    """The faults of a seed, by time."""
    # Routers and edges are few: a fault's kind of process is drawn first, otherwise engines would get nearly all faults.
    groups = [group for group in (engines, routers, edges, encoders) if group]
    draw = random.Random(f"faults {seed}")
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    faults = [_fault(draw, draw.choice(kinds), groups, routers) for _ in range(draw.randint(2, 12))]
    return sorted(faults, key=lambda fault: (fault.at_s, fault.kind, fault.target))


def _fault(draw: random.Random, kind: Kind, groups: list[list[str]], routers: list[str]) -> Fault:
    at = round(draw.uniform(FROM_S, UNTIL_S), 3)
    lasting = round(draw.uniform(0.2, min(LASTING_S_MAX, UNTIL_S + 3.0 - at)), 3)
    anyone = draw.choice(draw.choice(groups))
    match kind:
        case "drop" | "duplicate":
            return Fault(kind, at, lasting, amount=round(draw.choice([0.01, 0.05, 0.2, 0.5]), 3))
        case "answer_lost":
            return Fault(kind, at, lasting, amount=round(draw.choice([0.1, 0.5, 1.0]), 3))
        case "delay":
            return Fault(kind, at, lasting, amount=round(draw.choice([0.01, 0.1, 0.5, 2.0]), 3))
        case "partition" | "pause" | "crash":
            return Fault(kind, at, lasting, anyone)
        case "zombie":
            # Suspended for longer than its lease; another process takes its name.
            return Fault(kind, at, round(draw.uniform(LEASE_S + 0.5, LEASE_S + 3.0), 3), anyone)
        case "lease_loss" | "actor_failure":
            return Fault(kind, at, 0.0, anyone)
        case "clock_jump":
            return Fault(kind, at, 0.0, anyone, draw.choice([-3600.0, -10.0, 10.0, 3600.0]))
        case "slow_reader":
            return Fault(kind, at, lasting, draw.choice(routers), round(draw.uniform(0.05, 1.0), 3))
        case "log_unavailable" | "disk_full":
            return Fault(kind, at, lasting)
        case "purge" | "alter":
            return Fault(kind, at, 0.0, amount=round(draw.uniform(0.3, 1.0), 3))
        case "replace" | "leases_lost":
            return Fault(kind, at)


# Injection of faults, and their end.

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
        for fault in sorted(self._faults, key=lambda entry: entry.at_s):
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            tasks.append(loop.create_task(self._play(fault), name=f"fault {fault.kind}"))
        await asyncio.gather(*tasks)

    async def _play(self, fault: Fault) -> None:
        self._trace("fault", fault.target or "-", str(fault))
        network, store = self._fleet.network, self._fleet.store
        match fault.kind:
            case "drop" | "duplicate":
                await self._raise_meanwhile(network, fault.kind, fault)
            case "delay":
                await self._raise_meanwhile(network, "delay_s", fault)
            case "log_unavailable":
                await self._raise_meanwhile(store, "unavailable", fault)
            case "answer_lost":
                await self._raise_meanwhile(store, "answer_lost", fault)
            case "disk_full":
                await self._raise_meanwhile(store, "full", fault)
            case "slow_reader":
                await self._raise_meanwhile(self._fleet.processes[fault.target], "slow_reader_s", fault)
            case _:
                await getattr(self, f"_{fault.kind}")(fault)
        self._trace("over", fault.target or "-", fault.kind)

    async def _raise_meanwhile(self, owner: object, name: str, fault: Fault) -> None:
        """Raise a number, by one if the fault has no amount, while the fault lasts."""
        by = fault.amount or 1
        setattr(owner, name, getattr(owner, name) + by)
        await asyncio.sleep(fault.for_s)
        setattr(owner, name, getattr(owner, name) - by)

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
