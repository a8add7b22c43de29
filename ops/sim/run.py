"""One run: a fleet, its clients, the faults of a seed, and then the checks of all invariants.

0 s          3 s …… 27 s            57 s                   then
start        clients and faults     quiet: at most 30 s    probes, checks, a clean stop, checks

Clients send requests until 36 s: all requests to a fleet that has recovered must succeed.
"""

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import islice
from multiprocessing import get_context
from typing import Final, NamedTuple

import msgspec
import structlog

from headwater.actors.edge.actor import EdgeActor
from headwater.actors.runtime.tables import decode_lease
from headwater.engines import logs
from headwater.events.memory import MemoryLog
from headwater.ops.config.setting import ConfigError
from headwater.ops.sim import checks, loop
from headwater.ops.sim.checks import unexplained
from headwater.ops.sim.clients import Clients
from headwater.ops.sim.faults import UNTIL_S, Fault, Injector, schedule
from headwater.ops.sim.fleet import POOL, SimFleet, crowded, names
from headwater.ops.sim.images import SETTLED_S
from headwater.ops.sim.loop import Deadlock, VirtualLoop
from headwater.schemas.events import Role
from headwater.schemas.inference import Choreography
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
    return loop.run(lambda clock: _run(clock, seed, faults, show=show))


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
        problems += await _probe(clients, fleet)
        await asyncio.sleep(max(0.0, RUN_S - clock.time()))
        problems += await _settled(fleet, whole=injector.whole)
        problems += list(checks.streams(clients.sent))
        problems += unexplained(clients.sent, faults, healthy_s)
        await _check_pool(fleet, injector, problems)
        encoded = await _check_stopped(fleet, problems)
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
        sum(1 for request in clients.sent if request.end == "stop"),
        tracer.events,
        clock.time(),
        encoded,
    )


async def _probe(clients: Clients, fleet: SimFleet) -> list[str]:
    """Send requests to a fleet that has recovered: all must succeed."""
    probes = [await clients.send(edge, patient=True) for edge in fleet.edges * (PROBES // EDGES)]
    return [
        f"a probe at {probe.edge} ended: {probe.end}, HTTP {probe.status}"
        for probe in probes
        if probe.end != "stop"
    ]


async def _check_pool(fleet: SimFleet, injector: Injector, problems: list[str]) -> None:
    """Check the pool's log, and the routers that fold it. What was found before a deadlock counts: it is added to `problems` at once."""
    pool = await checks.messages(fleet.store.pool(POOL))
    problems += list(checks.fences(pool))
    if injector.whole:
        problems += list(await checks.snapshots(fleet, pool))
        problems += list(checks.decisions(pool))
    if not injector.altered:
        # Otherwise some routers folded the original message: they differ, and report it correctly.
        problems += list(checks.divergence(fleet))


async def _check_stopped(fleet: SimFleet, problems: list[str]) -> dict[str, int]:
    """Stop the fleet, and check what it leaves, and the log of requests. Returns the images sent to encode workers, by outcome."""
    await fleet.stop()
    await asyncio.sleep(SETTLED_S)
    problems += list(checks.leaks(fleet))
    problems += list(checks.handoffs(fleet))
    problems += await checks.lease_leaks(fleet)
    messages = await checks.messages(fleet.store.requests)
    problems += list(checks.fences(messages))
    problems += list(checks.terminal_events(messages))
    problems += list(checks.encode_legs(messages))
    return checks.count_encode_legs(messages)


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
    return [f"{QUIET_S:.0f} s after the last fault: {reason}" for reason in unhealthy]


async def _unhealthy(fleet: SimFleet) -> list[str]:
    problems = []
    for name in fleet.routers:
        if name not in fleet.actors:
            problems.append(f"{name}: not started")
            continue
        state = fleet.actors[name].stats()
        if state.get("workers") != len(fleet.workers) or state.get("state") != "ready":
            problems.append(f"{name}: {state}")
        elif fleet.router(name).state.cold:
            problems.append(f"{name}: cold workers")
    for name in fleet.edges:
        actor = fleet.actors.get(name)
        ready = isinstance(actor, EdgeActor) and actor.ready.is_set() and actor.stats()["state"] == "ready"
        if not ready or fleet.edge(name).workers(POOL) != len(fleet.workers):
            problems.append(f"{name}: not ready, or it does not see every worker")
            continue
        entry = await fleet.store.leases.get(lease_key("edge", name))
        held = decode_lease(entry) if entry is not None else None
        if held is None or held.epoch != fleet.edge(name).lease_epoch:
            # A process that was suspended may have taken the name in between: this one learns of it later.
            problems.append(f"{name}: its lease is not its own")
    return problems


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


# `headwater sim`: one seed, or many on all cores. A failing one is shrunk, and the command to reproduce it printed.

RUNS_MAX = 200


def shrink(faults: Sequence[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """Delta debugging: remove halves, then smaller parts, then single faults, as long as the rest still fails.

    `fails` is called at most `RUNS_MAX` times. The result fails if `faults` does, and none of its faults can be
    removed alone.
    """
    remaining = list(faults)
    parts = 2
    runs = 0
    while remaining and runs < RUNS_MAX:
        size = -(-len(remaining) // parts)
        smaller = None
        for start in range(0, len(remaining), size):
            candidate = remaining[:start] + remaining[start + size :]
            runs += 1
            if fails(candidate):
                smaller = candidate
                break
            if runs >= RUNS_MAX:
                return remaining
        if smaller is not None:
            remaining, parts = smaller, max(2, parts - 1)
        elif size == 1:
            return remaining
        else:
            parts = min(len(remaining), 2 * parts)
    return remaining


PROGRESS_S = 10.0
SHOWN_MAX = 8
FAILURES_SHOWN_MAX = 10


def run_one(seed: int, *, trace: bool, only: str, as_json: bool) -> int:
    """Run one seed and print what came of it; 1 if it failed."""
    quiet(trace=trace)
    faults = _chosen(seed, only)
    outcome = run_seed(seed, faults, show=trace)
    if as_json:
        print(msgspec.json.encode(outcome).decode())
        return int(outcome.failed)
    print(describe(outcome))
    if outcome.failed and not trace and len(outcome.faults) > 1 and not only:
        print(_shrunk(outcome))
    return int(outcome.failed)


def run_many(text: str, *, as_json: bool, jobs: int = 0) -> int:
    """Run the seeds FROM:TO (TO not included); 1 if any failed."""
    first, last = _range(text)
    began = printed = time.monotonic()
    failed: list[SeedOutcome] = []
    answered = events = done = 0
    encoded: Counter[str] = Counter()
    for outcome in outcomes(range(first, last), jobs or os.cpu_count() or 1):
        done += 1
        answered += outcome.answered
        events += outcome.events
        encoded.update(outcome.encoded)
        if outcome.failed:
            failed.append(outcome)
            if not as_json and len(failed) <= FAILURES_SHOWN_MAX:
                print(describe(outcome), flush=True)
        if not as_json and time.monotonic() - printed > PROGRESS_S:
            printed = time.monotonic()
            print(f"  {done} of {last - first}, {len(failed)} failed", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    if as_json:
        report = {
            "seeds": [first, last],
            "failed": [msgspec.to_builtins(outcome) for outcome in failed],
            "answered": answered,
            "events": events,
            "encoded": encoded,
            "seconds": round(seconds, 1),
        }
        print(msgspec.json.encode(report).decode())
        return int(bool(failed))
    if failed and len(failed[0].faults) > 1:
        quiet(trace=False)
        print(_shrunk(failed[0]))
    print(
        f"{done} seeds of {RUN_S:.0f} virtual seconds, {ENGINES} engines, {ROUTERS} routers, {EDGES} edges, up to {ENCODERS} encode workers: "
        f"{len(failed)} failed; {answered} requests answered, {events} events, images at encode workers: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in sorted(encoded.items())) or 'none'}; "
        f"{seconds:.0f} s ({done * RUN_S / max(seconds, 1e-9):.0f} times real time)"
    )
    if failed:
        kinds = checks.grouped([problem for outcome in failed for problem in outcome.problems])
        print("  " + "; ".join(f"{count} x {kind} …" for kind, count in sorted(kinds.items())))
    return int(bool(failed))


def outcomes(seeds: range, jobs: int) -> Iterator[SeedOutcome]:
    """The outcome of each seed as it comes, `jobs` at a time."""
    if jobs == 1:
        quiet(trace=False)
        yield from map(run_seed, seeds)
        return
    # Forked after the imports and the compiled kernels are here: workers start in no time.
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("fork"), initializer=partial(quiet, trace=False)
    ) as pool:
        remaining = iter(seeds)
        waiting = [pool.submit(run_seed, seed) for seed in islice(remaining, 2 * jobs)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(run_seed, seed) for seed in islice(remaining, 1)]


def _shrunk(outcome: SeedOutcome) -> str:
    """The fewest faults that fail, and the command that shows them."""
    print("  shrinking …", file=sys.stderr, flush=True)
    minimal_faults = shrink(outcome.faults, lambda faults: run_seed(outcome.seed, faults).failed)
    numbers = [number for number, fault in enumerate(outcome.faults) if fault in minimal_faults]
    again = run_seed(outcome.seed, minimal_faults)
    only = ",".join(map(str, numbers)) or "none"
    return (
        f"fails with {len(minimal_faults)} of {len(outcome.faults)} faults:\n{describe(again)}\n"
        f"  see it happen: headwater sim --seed {outcome.seed} --only {only} --trace"
    )


def describe(outcome: SeedOutcome) -> str:
    """A run for people: its faults, what was wrong, and how to see it again."""
    head = (
        f"seed {outcome.seed}: {'FAILED' if outcome.failed else 'passed'}; {outcome.answered} of "
        f"{outcome.requests} requests answered, {outcome.events} events, run {outcome.digest}"
    )
    lines = [head, *(f"  {fault}" for fault in outcome.faults)]
    lines += [f"  ! {problem}" for problem in outcome.problems[:SHOWN_MAX]]
    if len(outcome.problems) > SHOWN_MAX:
        lines.append(f"  ! and {len(outcome.problems) - SHOWN_MAX} more")
    if outcome.failed:
        lines.append(f"  again: headwater sim --seed {outcome.seed}")
    return "\n".join(lines)


def _chosen(seed: int, only: str) -> list[Fault] | None:
    """The faults of a seed that --only names by number."""
    if not only:
        return None
    faults = schedule(seed, *fleet_names(seed))
    if only == "none":
        return []
    try:
        return [faults[int(number)] for number in only.split(",")]
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"--only {only}: give numbers of faults from 0 to {len(faults) - 1}, as in 0,3, or none"
        ) from error


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (first.isdigit() and colon and last.isdigit() and int(first) < int(last)):
        raise ConfigError(f"--seeds {text}: give FROM:TO, as in 0:500")
    return int(first), int(last)


def quiet(*, trace: bool) -> None:
    """Configure logging: lines would drown the result, but with a trace they are part of it."""
    if not trace:
        logs.silence()
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
        cache_logger_on_first_use=False,
    )
