"""The fleet at any position of a pool log: states folded from snapshots that are close enough to one another, without KV events.

Who is there and what was routed to them follows from the kinds `fleet`, `load` and `route`, which are a small part of a log. What is
cached where needs its KV events too: see `ops.history.history`.
"""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from headwater.events.ports import Record
from headwater.router.fold.load import Loads
from headwater.router.fold.state import apply_to_loads
from headwater.router.fold.worker import Credit, NoCredit
from headwater.schemas.events.fleet import (
    EnginesWeighted,
    LoadReported,
    TrafficSplit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.events.route import Decision

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

    def __init__(self, loads: Loads | None = None, position: int = 0, stored_ns: int = 0) -> None:
        self.loads = Loads() if loads is None else loads
        self.loads.credit = NoCredit()
        self.position = position
        self.stored_ns = stored_ns
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
        kept = self.samples.get(record.batch.writer)
        if kept is None:
            kept = self.samples[record.batch.writer] = Samples()
        used = event.used_blocks / max(1, event.total_blocks)
        kept.add(record.stored_ns, event.running, event.waiting, used)

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
            self.bytes = sum(len(one.data) for one in self.rungs)

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


def fold_on(found: FleetAt, records: Sequence[Record]) -> FleetAt:
    """The state after further messages; changes the one that is passed."""
    for record in records:
        for event in record.batch.events:
            apply_to_loads(found.loads, record, event)
    return FleetAt(records[-1].position, records[-1].stored_ns, found.loads) if records else found


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
