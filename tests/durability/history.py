"""Histories and their checker, after Jepsen's set and log workloads.

Each life of a writer records what it asked for and what it was told (`Life`); afterwards the checker holds that
against what the log really has (`LogContent`). Nothing here knows how appending works.

    lost        acknowledged, and not in the log
    misplaced   acknowledged at a position where it is not
    duplicate   in the log more than once, after the rule that a repeated (writer, epoch, seq) does not count
    phantom     in the log, and never asked for
    reordered   a writer's events, or its batches' numbers, are not in the order in which it wrote them
    hole        an event is there and an earlier one of the same life is not; or a batch number was left out
    fenced      a message of an epoch that was over: behind the first one of a higher epoch on its subject
    pending     neither acknowledged nor fenced when the run had settled
    unread      positions that a reader passed over without a word, or said to be gone and were not
    memory      a process took more of it than it may
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

from headwater.events.ports import Slice
from headwater.schemas.encoding import Batch, LogEvent
from headwater.schemas.events import LoadReported
from tests.faults.report import Violation

Kind = Literal[
    "lost", "misplaced", "duplicate", "phantom", "reordered", "hole", "fenced", "pending", "unread", "memory"
]


class Key(NamedTuple):
    """One life of a writer on one subject."""

    subject: str
    writer: str
    epoch: int


def marked(event: int) -> LoadReported:
    """An event that carries its id."""
    return LoadReported(event, 0, 0, 1)


def mark(event: LogEvent) -> int:
    """The id of a marked event; -1 for any other."""
    return event.running if isinstance(event, LoadReported) else -1


class Life:
    """What one life of a writer asked for and was told. Event ids rise; each is invoked once.

    An event ends as ok, fenced or unknown; one that has not ended is pending. Columns instead of objects: a
    run has a million events.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.invoked = array("q")
        self.ok_events = array("q")
        self.ok_positions = array("q")
        self.repeated = 0
        self.ended: dict[int, Literal["fenced", "unknown"]] = {}

    def invoke(self, event: int) -> None:
        """The writer was asked to append this event."""
        self.invoked.append(event)

    def ok(self, event: int, position: int, *, again: bool = False) -> None:
        """It was told to be at `position` (0: at none in particular); with `again` an earlier try had put it there."""
        self.ok_events.append(event)
        self.ok_positions.append(position)
        self.repeated += again

    def fenced(self, event: int) -> None:
        """It was told that a later life writes. An earlier try may have stored it before that life began."""
        self.ended[event] = "fenced"

    def unknown(self, event: int) -> None:
        """No answer, and nobody will ask again: it may be in the log or not."""
        self.ended[event] = "unknown"


class LogContent:
    """What a log holds, folded from the slices of a reader, with what is wrong in that by itself."""

    def __init__(self) -> None:
        self.events: defaultdict[Key, array[int]] = defaultdict(lambda: array("q"))
        self.positions: defaultdict[Key, array[int]] = defaultdict(lambda: array("q"))
        self.messages = 0
        self.repeated_batches = 0
        self.gaps: list[tuple[int, int]] = []
        self.last = 0
        self._found: defaultdict[tuple[Kind, str], list[str]] = defaultdict(list)
        self._seq: dict[Key, int] = {}
        self._epoch: dict[str, int] = {}

    def add_slice(self, piece: Slice) -> None:
        """The next slice of one reading."""
        if piece.gap is not None:
            self.gap(piece.gap.first, piece.gap.last)
        skipped = {one.position for one in piece.unreadable}
        for record in piece.records:
            while self.last + 1 in skipped:
                self.last += 1
            self.add(record.position, record.subject, record.batch)
        while self.last + 1 in skipped:
            self.last += 1

    def gap(self, first: int, last: int) -> None:
        """The reader said that these positions are gone."""
        if first != self.last + 1 or last < first:
            self._found["unread", "gaps"].append(f"gap {first} to {last} declared at position {self.last}")
        self.gaps.append((first, last))
        self.last = last

    def add(self, position: int, subject: str, batch: Batch[LogEvent]) -> None:
        """The next message."""
        if position != self.last + 1:
            self._found["unread", "positions"].append(f"{position} came after {self.last}")
        self.last = position
        self.messages += 1
        key = Key(subject, batch.writer, batch.epoch)
        newest = self._epoch.get(subject, 0)
        if batch.epoch < newest:
            self._found["fenced", subject].append(
                f"{subject}: epoch {batch.epoch} at position {position}, behind epoch {newest}"
            )
        self._epoch[subject] = max(newest, batch.epoch)
        before = self._seq.get(key, 0)
        if batch.seq <= before:
            # Stored twice, as at-least-once appends may be: the second one does not count.
            self.repeated_batches += 1
            return
        if batch.seq != before + 1 and not self.gaps:
            self._found["hole", f"{key}"].append(
                f"{key}: batch {batch.seq} at position {position} follows batch {before}"
            )
        self._seq[key] = batch.seq
        events, positions = self.events[key], self.positions[key]
        for event in batch.events:
            events.append(mark(event))
            positions.append(position)

    def violations(self) -> list[Violation]:
        """What is wrong with the log whoever wrote it."""
        return [Violation(kind, len(examples), examples[0]) for (kind, _), examples in self._found.items()]


def check(lives: Iterable[Life], content: LogContent, *, settled: bool = True) -> list[Violation]:
    """Everything that is wrong; empty when the log kept its word.

    With `settled` every event must have ended. Lives of which the log has events and nobody has a history are
    phantoms.
    """
    found = content.violations()
    known = set()
    for life in lives:
        known.add(life.key)
        found += _check_life(life, content.events[life.key], content.positions[life.key], settled)
    for key in content.events.keys() - known:
        count = len(content.events[key])
        if count:
            found.append(Violation("phantom", count, f"{key}: nobody has a history of this life"))
    return found


def _check_life(life: Life, events: "array[int]", positions: "array[int]", settled: bool) -> list[Violation]:
    found: list[Violation] = []

    def tell(kind: Kind, wrong: list[int]) -> None:
        if wrong:
            found.append(Violation(kind, len(wrong), f"{life.key}: event {wrong[0]}"))

    where: dict[int, int] = {}
    twice = []
    for event, position in zip(events, positions, strict=True):
        if event in where:
            twice.append(event)
        where.setdefault(event, position)
    told = dict(zip(life.ok_events, life.ok_positions, strict=True))
    tell("duplicate", twice)
    tell("reordered", [late for early, late in pairwise(events) if late < early])
    tell("lost", [event for event in told if event not in where])
    tell(
        "misplaced",
        [event for event, position in told.items() if position and where.get(event, position) != position],
    )
    invoked = set(life.invoked)
    tell("phantom", [event for event in where if event not in invoked])
    if where:
        last = max(where)
        tell("hole", [e for e in life.invoked if e < last and e not in where and e not in told])
    if settled:
        tell("pending", [e for e in life.invoked if e not in told and e not in life.ended])
    return found
