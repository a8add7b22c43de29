"""One run: a fleet, its clients, the faults of a seed, and then the checks of all invariants.

0 s          3 s …… 27 s            57 s                   then
start        clients and faults     quiet: at most 30 s    probes, checks, a clean stop, checks

Clients send requests until 36 s: all requests to a fleet that has recovered must succeed.
"""

import asyncio
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.actor import EdgeActor
from headwater.actors.runtime.tables import decode_lease
from headwater.events.memory.log import MemoryLog
from headwater.ops.sim import checks, loop
from headwater.ops.sim.clients import Clients
from headwater.ops.sim.excuses import unexplained
from headwater.ops.sim.faults import UNTIL_S, Fault, schedule
from headwater.ops.sim.fleet import POOL, SimFleet, names
from headwater.ops.sim.images.transfers import SETTLED_S
from headwater.ops.sim.inject import Injector
from headwater.ops.sim.load_profile import crowded
from headwater.ops.sim.loop import Deadlock, VirtualLoop
from headwater.schemas.events.fleet import Role
from headwater.schemas.messages.handoff import Choreography
from headwater.schemas.subjects import lease_key

ENGINES: Final = 8
ROUTERS: Final = 2
EDGES: Final = 2
ENCODERS: Final = 2
REQUESTS: Final = 84
CLIENTS_FROM_S: Final = 2.0
CLIENTS_UNTIL_S: Final = 36.0
SPLIT: Final[tuple[Role, ...]] = ("prefill",) * 3 + ("decode",) * 4 + ("both",)
QUIET_S: Final = 30.0
SHOWS_S: Final = 1.0
RUN_S: Final = 60.0
PROBES: Final = 4


class SeedOutcome(msgspec.Struct):
    """The result of one run. `digest` is over all deliveries and stored messages.

    `encoded` counts the images that were sent to encode workers, by outcome (see `RequestEncoded`).
    """

    seed: int
    faults: list[Fault]
    problems: list[str]
    digest: str
    requests: int
    answered: int
    events: int
    virtual_s: float
    encoded: dict[str, int]

    @property
    def failed(self) -> bool:
        """Was an invariant violated?"""
        return bool(self.problems)


class Tracer:
    """Hashes all events of the network and the store; with `show` also prints them."""

    def __init__(self, clock: VirtualLoop, *, show: bool) -> None:
        self.events = 0
        self._hash = blake2b(digest_size=16)
        self._clock = clock
        self._show = show

    def __call__(self, what: str, who: str, about: str, data: bytes = b"") -> None:
        """See `network.Trace`."""
        self.events += 1
        line = f"{self._clock.time():.6f} {what} {who} {about}"
        self._hash.update(line.encode())
        if what == "stored":
            self._hash.update(data)
        if self._show:
            print(f"{self._clock.time():10.4f}  {what:<9} {who:<9} {about}", flush=True)

    def digest(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()


class FleetNames(NamedTuple):
    """The processes of a fleet."""

    engines: list[str]
    routers: list[str]
    edges: list[str]
    encoders: list[str]


def fleet_names(seed: int) -> FleetNames:
    """The processes of this seed: every second six have encode workers, so each of the kinds of fleets in `parts` with and without."""
    encoders = names("encode", ENCODERS if seed // 6 % 2 else 0)
    return FleetNames(names("engine", ENGINES), names("router", ROUTERS), names("edge", EDGES), encoders)


def parts(seed: int) -> tuple[Sequence[Role], Choreography]:
    """Roles and choreography of this seed: half of the seeds are disaggregated."""
    choreographies: tuple[Choreography, ...] = ("returned", "room", "opaque")
    return (SPLIT if seed % 2 else ()), choreographies[seed // 2 % 3]


def run_seed(seed: int, faults: list[Fault] | None = None, *, show: bool = False) -> SeedOutcome:
    """Run one seed, with its own faults or with those given."""
    return loop.run(lambda made: _run(made, seed, faults, show=show))


async def _run(clock: VirtualLoop, seed: int, faults: list[Fault] | None, *, show: bool) -> SeedOutcome:
    tracer = Tracer(clock, show=show)
    chosen = fleet_names(seed)
    fleet = SimFleet(
        clock,
        random.Random(f"network {seed}"),
        tracer,
        *chosen[:3],
        *parts(seed),
        seed,
        encoders=chosen.encoders,
    )
    if faults is None:
        faults = schedule(seed, *chosen)
    injector = Injector(fleet, faults, tracer)
    hints = random.Random(f"hints {seed}") if crowded(seed) else None
    draws = (random.Random(f"clients {seed}"), hints, random.Random(f"images {seed}"))
    clients = Clients(clock, fleet, *draws)
    problems: list[str] = []
    encoded: dict[str, int] = {}
    try:
        for name in fleet.names:
            fleet.start(name)
        asking = clock.create_task(clients.run(REQUESTS, CLIENTS_FROM_S, CLIENTS_UNTIL_S))
        await injector.run()
        problems += await _until_quiet(clock, fleet, max(clock.time(), UNTIL_S))
        healthy_s = clock.time()
        await asyncio.wait({asking}, timeout=100.0)
        probes = [await clients.send(edge, patient=True) for edge in fleet.edges * (PROBES // EDGES)]
        problems += [
            f"a probe at {one.edge} ended: {one.end}, HTTP {one.status}"
            for one in probes
            if one.end != "stop"
        ]
        await asyncio.sleep(max(0.0, RUN_S - clock.time()))
        problems += await _settled(fleet, whole=injector.whole)
        problems += list(checks.streams(clients.sent))
        problems += unexplained(clients.sent, faults, healthy_s)
        pool = await checks.messages(fleet.store.pool(POOL))
        problems += list(checks.fences(pool))
        if injector.whole:
            problems += list(await checks.snapshots(fleet, pool))
            problems += list(checks.decisions(pool))
        if not injector.altered:
            # Otherwise some routers folded the original message: they differ, and report it correctly.
            problems += list(checks.divergence(fleet))
        await fleet.stop()
        await asyncio.sleep(SETTLED_S)
        problems += list(checks.leaks(fleet))
        problems += list(checks.handoffs(fleet))
        problems += await checks.lease_leaks(fleet)
        found = await checks.messages(fleet.store.requests)
        problems += list(checks.fences(found))
        problems += list(checks.terminal_events(found))
        problems += list(checks.encode_legs(found))
        encoded = checks.count_encode_legs(found)
    except Deadlock as error:
        problems.append(f"deadlock: {error}")
    finally:
        for name in fleet.names:
            await fleet.kill(name)
    problems += fleet.unexpected
    problems += clock.failures
    return SeedOutcome(
        seed,
        faults,
        list(dict.fromkeys(problems)),
        tracer.digest(),
        len(clients.sent),
        sum(1 for one in clients.sent if one.end == "stop"),
        tracer.events,
        clock.time(),
        encoded,
    )


async def _until_quiet(clock: VirtualLoop, fleet: SimFleet, over_s: float) -> list[str]:
    """Wait until the fleet is healthy, within `QUIET_S` after the last fault: routers ready, edges with all workers."""
    deadline = over_s + QUIET_S
    # The effects of the last fault are delayed.
    await asyncio.sleep(SHOWS_S)
    unhealthy = ["not checked yet"]
    while clock.time() < deadline:
        unhealthy = await _unhealthy(fleet)
        if not unhealthy:
            return []
        await asyncio.sleep(0.25)
    return [f"{QUIET_S:.0f} s after the last fault: {one}" for one in unhealthy]


async def _unhealthy(fleet: SimFleet) -> list[str]:
    found = []
    for name in fleet.routers:
        if name not in fleet.actors:
            found.append(f"{name}: not started")
            continue
        state = fleet.actors[name].stats()
        if state.get("workers") != len(fleet.workers) or state.get("state") != "ready":
            found.append(f"{name}: {state}")
        elif fleet.router(name).state.cold:
            found.append(f"{name}: cold workers")
    for name in fleet.edges:
        actor = fleet.actors.get(name)
        ready = isinstance(actor, EdgeActor) and actor.ready.is_set() and actor.stats()["state"] == "ready"
        if not ready or fleet.edge(name).workers(POOL) != len(fleet.workers):
            found.append(f"{name}: not ready, or it does not see every worker")
            continue
        entry = await fleet.store.leases.get(lease_key("edge", name))
        held = decode_lease(entry) if entry is not None else None
        if held is None or held.epoch != fleet.edge(name).lease_epoch:
            # A process that was suspended may have taken the name in between: this one learns of it later.
            found.append(f"{name}: its lease is not its own")
    return found


async def _settled(fleet: SimFleet, *, whole: bool) -> list[str]:
    """The checks of live routers, repeated until no message is in transit to them."""
    problems: list[str] = []
    for _ in range(100):
        pool: MemoryLog = fleet.store.pool(POOL)
        problems = list(checks.routers(fleet, await checks.messages(pool), whole=whole))
        if not problems:
            return []
        await asyncio.sleep(0.0531)
    return problems
