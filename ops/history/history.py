"""The history of one pool: an index of its log and of the request log that grows with them, and the fleet at any position.

`History.follow` reads what is new. Of the pool log it takes all kinds but KV events, which are most of a log: they are read only
where someone asks what was cached (`state_at`), from the nearest snapshot on.

`FleetHistory` has who is there and what was routed to them: that follows from the kinds `fleet`, `load` and `route`, a small part of a log.
Its states are folded from snapshots that are close enough to one another.
"""

import asyncio
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Log, LogError, Record
from headwater.events.snapshot_store import SnapshotStore, continues
from headwater.ops.history.requests import RequestTable
from headwater.router.load import Loads
from headwater.router.state import RouterState, apply_to_loads
from headwater.router.worker import Credit, NoCredit
from headwater.schemas import subjects
from headwater.schemas.events import (
    EnginesWeighted,
    LoadReported,
    TrafficSplit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.routing import Decision, Shadowed
from headwater.schemas.subjects import ANY, PoolKind

RUNG_RECORDS: Final = 2_000
"""Messages between two kept states: folding them again takes a tenth of a second."""

RUNGS_BYTES_MAX: Final = 192 * 1024 * 1024
"""Compressed states kept. Beyond, every second one of the older half is dropped."""

SAMPLES_MAX: Final = 3_600
"""Load samples kept of a worker, one a second."""

MARKS_MAX: Final = 20_000

SECOND_NS: Final = 1_000_000_000


class Rung(NamedTuple):
    """A compressed state of the fleet at a position."""

    position: int
    stored_ns: int
    data: bytes


class Samples:
    """The load of one worker over time, in columns: when, requests that run and wait, and the share of its KV cache in use."""

    def __init__(self) -> None:
        self.times = array("q")
        self.running = array("i")
        self.waiting = array("i")
        self.used = array("f")

    def add(self, time_ns: int, running: int, waiting: int, used: float) -> None:
        """Note the load at a time, in place of an earlier one of the same second. The oldest of too many are dropped."""
        if self.times and self.times[-1] // SECOND_NS == time_ns // SECOND_NS:
            self.times[-1], self.running[-1] = time_ns, running
            self.waiting[-1], self.used[-1] = waiting, used
            return
        for column, value in zip(self._columns(), (time_ns, running, waiting, used), strict=True):
            column.append(value)
        if len(self.times) > SAMPLES_MAX:
            for column in self._columns():
                del column[: SAMPLES_MAX // 10]

    def _columns(self) -> tuple["array[Any]", ...]:
        return self.times, self.running, self.waiting, self.used


class Mark(NamedTuple):
    """An event of the fleet for people: `kind` is joined, left, drain, changed, weights or split."""

    time_ns: int
    position: int
    kind: str
    worker: str
    epoch: int
    text: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Loads).decode


class FleetHistory:
    """Folds the kinds `fleet`, `load` and `route` of one pool, and remembers states, load samples and changes."""

    def __init__(self, loads: Loads | None = None, position: int = 0) -> None:
        self.loads = Loads() if loads is None else loads
        self.loads.credit = NoCredit()
        self.position = position
        self.stored_ns = 0
        self.samples: dict[str, Samples] = {}
        self.marks: list[Mark] = []
        self.joined: dict[tuple[str, int], int] = {}
        """When each incarnation (worker, epoch) joined, in ns."""
        self.rungs: list[Rung] = []
        self.bytes = 0
        self._records = 0
        self._keep_rung()

    def fold(self, record: Record) -> None:
        """Take one message."""
        self.position, self.stored_ns = record.position, record.stored_ns
        for event in record.batch.events:
            apply_to_loads(self.loads, record, event)
            if isinstance(event, LoadReported):
                self._sample(record, event)
            elif not isinstance(event, Decision):
                mark = mark_of(record, event)
                if mark is not None:
                    self.marks.append(mark)
                    if mark.kind == "joined":
                        self.joined[mark.worker, mark.epoch] = mark.time_ns
        if len(self.marks) > MARKS_MAX:
            del self.marks[: MARKS_MAX // 10]
        self._records += 1
        if self._records >= RUNG_RECORDS:
            self._keep_rung()

    def _sample(self, record: Record, event: LoadReported) -> None:
        worker_samples = self.samples.get(record.batch.writer)
        if worker_samples is None:
            worker_samples = self.samples[record.batch.writer] = Samples()
        used = event.used_blocks / max(1, event.total_blocks)
        worker_samples.add(record.stored_ns, event.running, event.waiting, used)

    def _keep_rung(self) -> None:
        self._records = 0
        # Credit follows from the workers' requests, and only decisions use it.
        loads = msgspec.structs.replace(self.loads, credit=Credit())
        rung = Rung(self.position, self.stored_ns, zlib.compress(_encode(loads), 1))
        self.rungs.append(rung)
        self.bytes += len(rung.data)
        if self.bytes > RUNGS_BYTES_MAX and len(self.rungs) > 8:
            older = len(self.rungs) // 2
            # The first stays: what is before it cannot be shown.
            self.rungs = [self.rungs[0], *self.rungs[1:older][::2], *self.rungs[older:]]
            self.bytes = sum(len(kept_rung.data) for kept_rung in self.rungs)

    def rung_before(self, position: int) -> Rung | None:
        """The last kept state at or before a position; None for a position before the first one."""
        at = bisect_right(self.rungs, position, key=attrgetter("position"))
        return self.rungs[at - 1] if at else None

    def marks_between(self, from_ns: int, to_ns: int) -> Sequence[Mark]:
        """Changes of the fleet after one time and until another, in order."""
        start = bisect_right(self.marks, from_ns, key=attrgetter("time_ns"))
        return self.marks[start : bisect_right(self.marks, to_ns, lo=start, key=attrgetter("time_ns"))]


class FleetAt(NamedTuple):
    """The fleet as of a position, which was stored at `stored_ns`."""

    position: int
    stored_ns: int
    loads: Loads


def restore(rung: Rung) -> FleetAt:
    """The state of a rung, which the caller may fold on."""
    loads = _decode(zlib.decompress(rung.data))
    loads.credit = NoCredit()
    return FleetAt(rung.position, rung.stored_ns, loads)


def fold_on(fleet: FleetAt, records: Sequence[Record]) -> FleetAt:
    """The state after further messages; changes the one that is passed."""
    for record in records:
        for event in record.batch.events:
            apply_to_loads(fleet.loads, record, event)
    return FleetAt(records[-1].position, records[-1].stored_ns, fleet.loads) if records else fleet


def mark_of(record: Record, event: object) -> Mark | None:
    """A change of the fleet as a mark; None for other events."""

    def mark(kind: str, worker: str, epoch: int, text: str) -> Mark:
        return Mark(record.stored_ns, record.position, kind, worker, epoch, text)

    match event:
        case WorkerJoined():
            of = f", revision {event.revision}" if event.revision else ""
            return mark(
                "joined", event.worker, event.epoch, f"joined as {event.role} with {event.engine}{of}"
            )
        case WorkerLeft():
            return mark("left", event.worker, event.epoch, f"left: {event.reason}")
        case WorkerDraining():
            return mark("drain", event.worker, event.epoch, "takes no new requests")
        case WorkerChanged():
            more = "".join(
                f", {name} {' '.join(values)}"
                for name, values in (("adapters", event.loras), ("taints", event.taints))
                if values
            )
            return mark("changed", event.worker, event.epoch, f"is {event.state} as {event.role}{more}")
        case EnginesWeighted():
            weights = " ".join(f"{name}={weight:g}" for name, weight in event.weights.items())
            return mark(
                "weights", "", 0, f"engine weights: {weights or 'none'}, set by {event.by or 'unknown'}"
            )
        case TrafficSplit():
            shares = " ".join(f"{name}={share:g}" for name, share in event.shares.items()) or "none"
            why = f": {event.reason}" if event.reason else ""
            text = f"split by {event.subject}: {shares}, set by {event.by or 'unknown'}{why}"
            return mark("split", "", 0, text)
        case _:
            return None


FOLDED_KINDS: Final[tuple[PoolKind, ...]] = ("fleet", "load", "route", "shadow")

TIMES_EVERY: Final = 16
"""Of every so many messages one is kept to find the time of a position."""

LADDER_S: Final = 5.0
"""How long a list of the snapshots is used: each costs a request to the object store, and a router saves one every 30 s at most."""

MODEL_BLOCKS: Final = 1
"""Block size assumed of a worker whose joining the log does not have."""

_log = structlog.get_logger("headwater.history")


class NotKept(LookupError):
    """What was asked for is older than the log, or not folded yet; the message says which."""


class Moment(NamedTuple):
    """A position of the pool log, and when the log's server stored it, in ns."""

    position: int
    stored_ns: int


class Ladder(NamedTuple):
    """The positions of a pool's snapshots, ascending, and its bookmarks by name; listed at `listed_s` of the event loop's clock."""

    snapshots: list[int]
    bookmarks: dict[str, int]
    listed_s: float


class History:
    """The past of one pool as of `indexed`, the position up to which it was folded."""

    def __init__(self, ports: Ports, pool: str, log: Log) -> None:
        self.pool = pool
        self.log = log
        self.ports = ports
        self.requests = RequestTable()
        self.fleet = FleetHistory()
        self.shadows: dict[str, list[tuple[int, Shadowed]]] = {}
        """What shadow routers would have chosen, with the positions at which that is stored, by the name of the decision."""
        self.engines: dict[str, str] = {}
        self.identity = ""
        self.first = 0
        self.last = Moment(0, 0)
        """The newest message that is folded."""
        self.head = 0
        """The last position of the log when it was last asked."""
        self.caught_up = asyncio.Event()
        """Set once everything was read that was there when the history was opened."""
        self.indexed_from = 0
        self.first_moment = Moment(0, 0)
        """The first message that the history has."""
        self._times: list[Moment] = []
        self._request_position = 0
        self.snapshots = SnapshotStore(ports.blobs, pool)
        self._state: RouterState | None = None
        self._fleet: FleetAt | None = None
        self._states = asyncio.Lock()
        self._following = asyncio.Lock()
        self._ladder = Ladder([], {}, -LADDER_S)
        self.subjects = [subjects.pool_subject(ports.ns, pool, kind, ANY) for kind in FOLDED_KINDS]

    @property
    def indexed(self) -> int:
        """The position up to which the history is folded."""
        return self.fleet.position

    async def open(self) -> None:
        """Find where the history begins: at the log's start, or at the oldest snapshot that it continues."""
        bounds = await self.log.bounds()
        self.identity = await self.log.identity()
        self.first = bounds.first
        if bounds.first > 1:
            for position in await self.snapshots.positions():
                if continues(position, bounds) and (state := await self._restored(position)) is not None:
                    self._start(state.loads, position)
                    break
            else:
                self._start(Loads(), bounds.first - 1)
        first = await self._stored_ns(self.indexed + 1)
        self.first_moment = Moment(self.indexed, first)
        # Requests that were accepted before the first position are not listed: their decisions are unknown.
        self._request_position = await self.ports.requests.position_at(first) if first else 0

    def _start(self, loads: Loads, position: int) -> None:
        self.fleet = FleetHistory(loads, position)
        self.indexed_from = position
        self.engines = {worker.name: worker.engine for worker in loads.workers.values()}

    async def _stored_ns(self, position: int) -> int:
        """When the message at a position, or the next one, was stored; 0 at the log's end."""
        async for piece in self.log.scan(position - 1, position + 1_000):
            if piece.records:
                return piece.records[0].stored_ns
        return 0

    async def follow(self) -> bool:
        """Read what the logs have beyond what was read. False if there was nothing. Calls are made one after the other."""
        async with self._following:
            return await self._follow()

    async def _follow(self) -> bool:
        bounds = await self.log.bounds()
        if bounds.last < self.indexed or await self.log.identity() != self.identity:
            raise NotKept("the log was replaced by another one of the same name")
        self.first, self.head = bounds.first, bounds.last
        was, requests_were = self.last.position, self._request_position
        # Requests first: a decision is shown with the request that it is about.
        until = (await self.ports.requests.bounds()).last
        if until > self._request_position:
            async for piece in self.ports.requests.scan(self._request_position, until):
                for record in piece.records:
                    self.requests.fold(record)
                    self._request_position = record.position
                await asyncio.sleep(0)
            self._request_position = until
        if bounds.last > self.last.position:
            async for piece in self.log.scan(self.last.position or self.indexed, bounds.last, self.subjects):
                for record in piece.records:
                    self._fold(record)
                await asyncio.sleep(0)
            if self.last.position < bounds.last:
                stored_ns = await self._stored_ns(bounds.last) or self.fleet.stored_ns
                self.last = Moment(bounds.last, max(stored_ns, self.last.stored_ns))
            self._times.append(self.last)
            # What was left out does not change the fleet.
            self.fleet.position, self.fleet.stored_ns = self.last
        self.caught_up.set()
        return self.last.position > was or self._request_position > requests_were

    def _fold(self, record: Record) -> None:
        self.fleet.fold(record)
        self.last = Moment(record.position, record.stored_ns)
        if record.position % TIMES_EVERY == 0 or not self._times:
            self._times.append(Moment(record.position, record.stored_ns))
        for event in record.batch.events:
            if isinstance(event, Decision):
                worker = self.fleet.loads.workers.get(event.worker)
                block_size = worker.block_size if worker is not None else MODEL_BLOCKS
                self.requests.decide(event, record.position, block_size)
            elif isinstance(event, WorkerJoined):
                self.engines[event.worker] = event.engine
            elif isinstance(event, Shadowed):
                self.shadows.setdefault(event.request, []).append((record.position, event))

    async def moment(self, position: int | None) -> Moment:
        """A position with its time; without one, the newest that is folded. Raises `NotKept`."""
        if position is None or position >= self.last.position:
            return self.last
        if position < max(self.indexed_from, self.first - 1):
            raise NotKept(
                f"position {position} is gone: the log and its snapshots begin at {max(self.indexed_from, self.first - 1)}"
            )
        at = bisect_right(self._times, position, key=lambda moment: moment.position)
        near = self._times[at - 1] if at else Moment(self.indexed_from, 0)
        if near.position == position:
            return near
        async for piece in self.log.scan(max(near.position, position - 64), position):
            for record in piece.records:
                near = Moment(position, record.stored_ns)
        return Moment(position, near.stored_ns)

    async def position_at(self, wall_ns: int) -> int:
        """The last position that was stored at a time or before it."""
        return max(await self.log.position_at(wall_ns), self.indexed_from)

    async def ladder(self) -> Ladder:
        """The pool's snapshots and bookmarks, as they were at most `LADDER_S` ago. Raises `LogError`."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._ladder.listed_s >= LADDER_S:
            snapshots = await self.snapshots.positions()
            self._ladder = Ladder(snapshots, await self.snapshots.bookmarks.all(), now_s)
        return self._ladder

    async def fleet_at(self, moment: Moment) -> FleetAt:
        """The fleet at a position. Raises `NotKept`.

        The caller must not change it, and be done with it before it awaits anything: the next call folds it on.
        """
        if moment.position >= self.indexed:
            return FleetAt(moment.position, moment.stored_ns, self.fleet.loads)
        async with self._states:
            rung = self.fleet.rung_before(moment.position)
            if rung is None:
                raise NotKept(
                    f"position {moment.position} is before the history, which begins at {self.indexed_from}"
                )
            fleet = self._fleet
            if fleet is None or not rung.position <= fleet.position <= moment.position:
                fleet = restore(rung)
            self._fleet = None
            async for piece in self.log.scan(fleet.position, moment.position, self.subjects):
                fleet = fold_on(fleet, piece.records)
            self._fleet = FleetAt(moment.position, moment.stored_ns, fleet.loads)
            return self._fleet

    async def state_at(self, position: int) -> RouterState:
        """The whole state of a router at a position: with what is cached. Raises `NotKept` and `LogError`.

        The caller must be done with it before it awaits anything: the next call folds it on.
        """
        async with self._states:
            base = self._state
            if base is None or base.position > position:
                base = await self._nearest(position)
            else:
                newer = await self._snapshot_between(base.position, position)
                base = newer or base
            self._state = None
            async for piece in self.log.scan(base.position, position):
                base.fold(piece)
                await asyncio.sleep(0)
            self._state = base
            return base

    async def _snapshot_between(self, after: int, until: int) -> RouterState | None:
        """A snapshot that saves folding much of the way."""
        if until - after < 20_000:
            return None
        near = [stored for stored in await self.snapshots.positions() if after + 10_000 < stored <= until]
        return await self._restored(near[-1]) if near else None

    async def _nearest(self, position: int) -> RouterState:
        bounds = await self.log.bounds()
        for snapshot_position in reversed(await self.snapshots.positions()):
            if bounds.first - 1 <= snapshot_position <= position:
                state = await self._restored(snapshot_position)
                if state is not None:
                    return state
        if bounds.first > 1:
            raise NotKept(
                f"what was cached at position {position} is not known: the log begins at {bounds.first}, and no snapshot that it "
                "continues is older"
            )
        return RouterState()

    async def _restored(self, position: int) -> RouterState | None:
        try:
            return await asyncio.to_thread(RouterState.restore, await self.snapshots.at(position))
        except (LogError, LookupError, TypeError, ValueError) as error:
            _log.warning("snapshot_unusable", log_position=position, reason=repr(error))
            return None

    async def record_at(self, position: int) -> Record | None:
        """The message of the pool log at a position."""
        async for piece in self.log.scan(position - 1, position):
            for record in piece.records:
                return record
        return None
