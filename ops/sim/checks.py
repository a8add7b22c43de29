"""Invariants of every run, whatever its faults. Each check returns descriptions of violations.

A request that ends in an error, a rejection or a broken connection is explained by a fault that was active during the
request, or so shortly before it that the fleet was still recovering. Faults of encode workers explain nothing, as a worker
encodes the images of its requests where they do not. Faults of the log alone (no leader, a full disk, lost
replies, a lost lease bucket) explain nothing, since tokens do not pass through the log; but a starting process needs the
log, so such a fault prolongs the recovery of one that was down.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from headwater.actors.runtime.tables import LeaseTable
from headwater.events.memory import MemoryLog
from headwater.events.ports import Record, Unreadable
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.sim.clients import ClientEvent
from headwater.ops.sim.faults import Fault, Kind
from headwater.ops.sim.fleet import POOL, SimFleet
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.replay import Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.events import RequestAccepted, RequestEncoded, RequestEnded
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.routing import Decision


async def messages(log: MemoryLog) -> list[Record | Unreadable]:
    """All messages of a log, in order."""
    collected: list[Record | Unreadable] = []
    async for piece in log.read(0, follow=False):
        collected += piece.records
        collected += piece.unreadable
    return sorted(collected, key=lambda message: message.position)


def streams(sent: list[ClientEvent]) -> Iterator[str]:
    """No token is lost, repeated or changed, and a request has at most one terminal answer."""
    for request in sent:
        expected = request.expected()
        name = f"client {request.number} (edge {request.edge}, sent at {request.at_s:.3f} s)"
        if not expected.startswith(request.text):
            yield f"{name}: got {request.text!r}, expected {expected!r}"
        if request.finishes + request.errors > 1 or request.dones > 1:
            yield f"{name}: {request.finishes} finishes, {request.errors} errors, {request.dones} times done"
        if request.end == "stop" and (request.text != expected or request.finishes != 1):
            yield f"{name}: ended well with {len(request.text)} of {request.tokens} tokens, {request.finishes} finishes"
        if request.end in ("open", "hangs"):
            yield f"{name}: never ended ({request.end})"
        if request.status not in (0, -1, 200, 429, 499, 502, 503, 504):
            yield f"{name}: HTTP status {request.status}"


def terminal_events(messages: list[Record | Unreadable]) -> Iterator[str]:
    """Every accepted request has exactly one terminal event, and nothing ends that was not accepted."""
    accepted: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for message in messages:
        if isinstance(message, Unreadable):
            yield f"request log position {message.position}: {message.reason}"
            continue
        for event in message.batch.events:
            if isinstance(event, RequestAccepted):
                accepted[event.request] += 1
            elif isinstance(event, RequestEnded):
                ended[event.request] += 1
                if not accepted[event.request]:
                    yield f"{event.request} ended at position {message.position} before it was accepted"
    for request, times in accepted.items():
        if times != 1 or ended[request] != 1:
            yield f"{request}: accepted {times} times, ended {ended[request]} times"


def encode_legs(messages: list[Record | Unreadable]) -> Iterator[str]:
    """No encode worker failed by a fault of its own."""
    for event in _encoded(messages):
        if event.reason.startswith("the engine failed"):
            yield f"{event.attempt}: image {event.image} at {event.worker}: {event.reason}"


def count_encode_legs(messages: list[Record | Unreadable]) -> dict[str, int]:
    """The images that were sent to encode workers, by outcome."""
    return dict(sorted(Counter(event.outcome for event in _encoded(messages)).items()))


def _encoded(messages: list[Record | Unreadable]) -> Iterator[RequestEncoded]:
    for message in messages:
        for event in message.batch.events if isinstance(message, Record) else ():
            if isinstance(event, RequestEncoded):
                yield event


def fences(messages: list[Record | Unreadable]) -> Iterator[str]:
    """Check that epochs never decrease on a subject, and that each incarnation's messages occur once, in order, from the first."""
    last: dict[str, tuple[int, int]] = {}
    for message in messages:
        if isinstance(message, Unreadable):
            # Altered by a fault; the fold checks the messages after it.
            last.pop(message.subject, None)
            continue
        batch = message.batch
        epoch, seq = last.get(message.subject, (0, 0))
        if batch.epoch < epoch:
            yield f"position {message.position}: epoch {batch.epoch} wrote to {message.subject} after {epoch}"
        elif batch.epoch == epoch and batch.seq <= seq:
            yield f"position {message.position}: message {batch.seq} of {message.subject} came after {seq}"
        last[message.subject] = (batch.epoch, batch.seq)


def folded(messages: list[Record | Unreadable], *, whole: bool) -> RouterState:
    """The fold of all messages."""
    state = RouterState(whole=whole)
    if not whole and messages:
        state.position = messages[0].position - 1
    for message in messages:
        state.take(message)
    return state


async def snapshots(fleet: SimFleet, messages: list[Record | Unreadable]) -> Iterator[str]:
    """A snapshot and the messages after it fold to the same state as all messages."""
    problems: list[str] = []
    store = SnapshotStore(fleet.store.blobs, POOL)
    snapshot = await store.newest(lambda _: True)
    if snapshot is not None:
        state = RouterState.restore(snapshot)
        for message in messages:
            if message.position > snapshot.position:
                state.take(message)
        everything = folded(messages, whole=True)
        if state.digest() != everything.digest():
            problems.append(
                f"the snapshot at {snapshot.position} and its tail differ from a fold of everything"
            )
        if state.chains.heads != everything.chains.heads:
            problems.append(f"the snapshot at {snapshot.position} has lost its chain heads")
    return iter(problems)


def decisions(messages: list[Record | Unreadable]) -> Iterator[str]:
    """Every decision is reproduced when it is recomputed from the log."""
    recorded = [
        Recorded((message.batch.writer, message.batch.epoch), event)
        for message in messages
        if isinstance(message, Record)
        for event in message.batch.events
        if isinstance(event, Decision)
    ]
    replay = Replay(RouterState(), recorded)
    difference = replay.start()
    for message in messages:
        difference = difference or replay.step(message)
    if difference is not None:
        yield f"decision for {difference.recorded.request} of {difference.incarnation} is not reproduced: {difference.recomputed}"
    if replay.verified + replay.unverifiable != len(recorded):
        yield f"{len(recorded)} decisions, {replay.verified} verified, {replay.unverifiable} could not be"


def routers(fleet: SimFleet, messages: list[Record | Unreadable], *, whole: bool) -> Iterator[str]:
    """Live routers have the state of the log's fold, see all workers, and have empty queues."""
    end = messages[-1].position if messages else 0
    everything = folded(messages, whole=whole) if whole else None
    for name in fleet.routers:
        state = fleet.router(name).state
        if state.position != end:
            yield f"{name} is at position {state.position}, the log ends at {end}"
        elif everything is not None and state.digest() != everything.digest():
            yield f"{name} differs from the fold of the log at position {end}{_difference(state, everything)}"
        if sorted(state.loads.workers) != fleet.workers:
            yield f"{name} sees workers {sorted(state.loads.workers)}"
        if fleet.router(name).stats()["waiting"]:
            yield f"{name} still has waiting queries"
        if state.cold:
            yield f"{name} has cold workers {sorted(state.cold)}"
        for worker in state.loads.workers.values():
            open_requests = [r for r in worker.requests if r not in worker.unaccepted]
            if open_requests:
                yield f"{name} counts requests of {worker.name} that have ended: {open_requests[:3]}"
        yield from _index(fleet, name, state.index)


def _difference(state: RouterState, other: RouterState) -> str:
    parts = [
        part
        for part, left, right in (
            ("index", state.index.digest(), other.index.digest()),
            ("copies", state.index.copies, other.index.copies),
            ("slots", state.index.slots, other.index.slots),
            ("workers", state.loads.workers, other.loads.workers),
            ("early", state.loads.early, other.loads.early),
            ("cold", state.cold, other.cold),
        )
        if left != right
    ]
    return f": {', '.join(parts)}"


def _index(fleet: SimFleet, router: str, index: PrefixIndex) -> Iterator[str]:
    """The index has for each worker exactly its engine's cached blocks."""
    for name in fleet.workers:
        if name not in index.slots:
            yield f"{router} has no entry for {name} in its index"
            continue
        held: Counter[int] = Counter()
        for event in fleet.cached_blocks(name):
            held.update(unpack_hashes(event.hashes).tolist())
        if index.blocks.get(name, 0) != len(held):
            yield f"{router} counts {index.blocks.get(name, 0)} blocks of {name}, which has {len(held)}"
            continue
        extra = sum(len(copies) for (worker, _), copies in index.copies.items() if worker == name)
        if extra:
            yield f"{router} counts several copies of {extra} blocks of {name}, which has one of each"
        slot = index.slots[name]
        missing = [block for block in held if not _holds(index, slot, block)]
        if missing:
            yield f"{router} misses {len(missing)} blocks of {name}"


def _holds(index: PrefixIndex, slot: int, block: int) -> bool:
    path = index.path(block, 4_096)
    if path is None:
        return False
    depth, depths = index.find(path)
    return depth >= len(path) and int(depths[0, slot]) >= len(path)


def divergence(fleet: SimFleet) -> Iterator[str]:
    """No incarnation of a router found another one with a different state at the same position."""
    for router in fleet.router_lives:
        stats = router.stats()
        if stats["divergence_alarms"]:
            yield f"{router.name} raised {stats['divergence_alarms']} alarms: it differs from {stats['diverged']}"


def leaks(fleet: SimFleet) -> Iterator[str]:
    """A while after a clean stop no task, lease, subscription, inbox, used block, medium or embedding is left."""
    for name, process in fleet.processes.items():
        unfinished = [task.get_name() for task in process.group.tasks]
        if unfinished:
            yield f"{name} left tasks: {unfinished[:5]}"
    subscriptions = fleet.network.subscriptions()
    if subscriptions:
        yield f"subscriptions left: {subscriptions[:5]}"
    if fleet.network.open_inboxes():
        yield f"{fleet.network.open_inboxes()} inboxes left"
    for name in fleet.engines:
        load = fleet.sim_engines[name].load()
        if load.running or load.waiting or load.used_blocks:
            yield f"{name} still has {load.running} running, {load.waiting} waiting, {load.used_blocks} blocks"
    for name in fleet.encoders:
        running = fleet.sim_encoders[name].load().running
        if running:
            yield f"{name} still encodes {running} images"
    for name in fleet.edges:
        held = fleet.edge(name).media_held
        if held:
            yield f"{name} still holds the media of ended requests: {held}"
    yield from fleet.transfers.leaks()
    yield from (f"it did not end when killed: {task}" for task in fleet.stuck)


async def lease_leaks(fleet: SimFleet) -> list[str]:
    """Leases that were not released."""
    return [
        f"lease left: {lease.kind}.{lease.name}" for lease in await LeaseTable(fleet.store.leases).read_all()
    ]


def grouped(problems: list[str]) -> dict[str, int]:
    """Problems grouped by their first words, for a summary over many seeds."""
    counts: defaultdict[str, int] = defaultdict(int)
    for problem in problems:
        counts[" ".join(problem.split()[:3])] += 1
    return dict(counts)


def handoffs(fleet: SimFleet) -> Iterator[str]:
    """No KV was fetched twice or for another prompt, and none is pinned at the end."""
    if fleet.fabric.spoiled:
        yield f"{fleet.fabric.spoiled} hand-offs were used twice, or for another prompt"
    for name in fleet.fabric.pins:
        yield f"the KV of {name} is still pinned"


# Which faults may make a request fail. Every other failure is a bug.

RECOVERY_S: Final = 5.0
"""A new process waits for its predecessor's lease to expire, then reads its state."""

ANSWER_S: Final = 6.0
"""A request to the log whose reply was lost is retried after at most this time."""

MOMENT_S: Final = 1e-6

DOWN: Final[frozenset[Kind]] = frozenset({"crash", "zombie", "pause", "partition", "actor_failure"})
"""A process ended, or does not respond. This affects clients of an edge, and requests without another router or worker."""

MESSAGES: Final[frozenset[Kind]] = frozenset({"drop", "delay"})
"""Messages between processes are delayed or lost."""

LOG: Final[frozenset[Kind]] = frozenset({"log_unavailable", "answer_lost", "disk_full"})

HINDERS: Final[frozenset[Kind]] = LOG | {"delay"}
"""The log replies late, or not at all: a starting process sends about ten requests to it."""


def unexplained(sent: list[ClientEvent], faults: list[Fault], healthy_s: float) -> list[str]:
    """Requests that failed without a fault that explains it, or after the fleet was healthy again at `healthy_s`."""
    problems = []
    for request in sent:
        if request.end not in ("error", "refused", "reset") or request.limited:
            continue
        if request.at_s > healthy_s or not any(_explains(fault, request, faults) for fault in faults):
            problems.append(
                f"client {request.number} (edge {request.edge}, {request.at_s:.3f} to {request.ended_s:.3f} s): {request.end}, "
                f"HTTP {request.status}, not explained by a fault: {request.reason or 'no reason given'}"
            )
    return problems


def _explains(fault: Fault, request: ClientEvent, faults: list[Fault]) -> bool:
    # Virtual times are floats: what a fault ends may end slightly before it.
    if fault.at_s > request.ended_s + MOMENT_S:
        return False
    if fault.kind in MESSAGES:
        return request.end != "reset" and request.at_s <= fault.at_s + fault.for_s + RECOVERY_S
    process = fault.target.partition("-")[0]
    if process == "encode":
        return False
    concerned = fault.target == request.edge if process == "edge" else request.end != "reset"
    return fault.kind in DOWN and concerned and request.at_s <= _recovered_s(fault, faults)


def _recovered_s(fault: Fault, faults: list[Fault]) -> float:
    """Return when the process has recovered, given that the log is available."""
    until = fault.at_s + fault.for_s + RECOVERY_S
    for other in sorted(faults, key=lambda entry: entry.at_s):
        again = other.kind in DOWN and other.target == fault.target and other is not fault
        hinders = other.kind in HINDERS or again
        if hinders and fault.at_s <= other.at_s + other.for_s and other.at_s <= until:
            until = max(until, other.at_s + other.for_s + RECOVERY_S + ANSWER_S)
    return until
