"""A pool log as several workers would write it over several lives, message by message, and what may happen to it."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from headwater.events.chain import Break
from headwater.events.ports import Record, Unreadable
from headwater.router.state import RouterState
from headwater.schemas.encoding import NO_DIGEST, SCHEMA_VERSION, Batch, UnreadableBatch, decode_batch, seal
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReported,
    RequestsHeld,
)
from headwater.schemas.subjects import pool_subject, writer_of
from tests.support.data.examples import joined, packed
from tests.support.worlds.clock import WALL_NS

WRITERS = ("w1", "w2", "w3")


class Told(NamedTuple):
    """One message; `batch` is what its writer meant."""

    subject: str
    data: bytes
    batch: Batch[Any]


def subject(kind: Any, writer: str) -> str:
    """Subject of a writer's events of one kind."""
    return pool_subject("ns", "p", kind, writer)


class Teller:
    """Writes messages with sound chains. `draw(n)` gives a number from 0 to n."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw
        self.told: list[Told] = []
        self.epochs: dict[str, int] = {}
        self._heads: dict[str, tuple[int, int, bytes]] = {}
        self._lives = 0

    def tell(self, kind: str, writer: str, *events: Event, epoch: int = 0) -> Told:
        """Append one message of the writer's present life, or of `epoch`."""
        name, epoch = subject(kind, writer), epoch or self.epochs[writer]
        at, seq, digest = self._heads.get(name, (0, 0, NO_DIGEST))
        seq = seq + 1 if at == epoch else 1
        batch: Batch[Any] = Batch(SCHEMA_VERSION, writer, epoch, seq, WALL_NS, events, previous=digest)
        message = seal(batch)
        self._heads[name] = (epoch, seq, message.digest)
        self.told.append(Told(name, message.data, batch))
        return self.told[-1]

    def begin(self, writer: str) -> None:
        """An incarnation joins, as `Incarnation.join` does."""
        self._lives += 1
        self.epochs[writer] = self._lives
        self.tell("fleet", writer, joined(writer, self._lives))
        self.tell("kv", writer, BlocksCleared())
        self.tell("load", writer, RequestsHeld(()))

    def turn(self) -> None:
        """Somebody says something."""
        writer = WRITERS[self.draw(len(WRITERS) - 1)]
        kind = self.draw(9)
        if writer not in self.epochs or kind == 0:
            self.begin(writer)
        elif kind == 1:
            self.tell("kv", writer, BlocksCleared(), BlocksStored(0, packed(1 + self.draw(9))))
        elif kind < 5:
            self.tell("kv", writer, BlocksStored(0, packed(1 + self.draw(9))))
        elif kind == 5:
            self.tell("kv", writer, BlocksRemoved(packed(1 + self.draw(9))))
        elif kind == 6:
            self.tell("fleet", writer, joined(writer, self.epochs[writer]))
        else:
            self.tell("load", writer, LoadReported(self.draw(9), 0, 0, 1000))


def a_log(draw: Callable[[int], int], turns: int) -> list[Told]:
    """The log after some turns; every worker has begun in it."""
    teller = Teller(draw)
    for writer in WRITERS:
        teller.begin(writer)
    for _ in range(turns):
        teller.turn()
    return teller.told


def read(told: Iterable[Told], first: int = 1) -> list[Record | Unreadable]:
    """What a reader gets of these messages."""
    found: list[Record | Unreadable] = []
    for position, one in enumerate(told, first):
        try:
            found.append(Record(position, one.subject, WALL_NS, decode_batch(one.data)))
        except UnreadableBatch as error:
            found.append(Unreadable(position, one.subject, str(error)))
    return found


class Folded:
    """A fold that notes every break, and holds at every message that the right workers are cold."""

    def __init__(self, state: RouterState | None = None) -> None:
        self.state = state or RouterState()
        self.breaks: list[Break] = []
        self.unreadable: list[int] = []
        self._cold = set(self.state.cold)
        self._newest = {name: (head.epoch, head.seq) for name, head in self.state.chains.heads.items()}

    def over(self, found: Iterable[Record | Unreadable]) -> "Folded":
        """Fold these."""
        for message in found:
            if isinstance(message, Unreadable):
                self.state.skip(message)
                self.unreadable.append(message.position)
                self._doubt(writer_of(message.subject))
            else:
                self._fold(message)
            assert self.state.position == message.position
            assert self.state.cold == self._cold, message
        return self

    def _fold(self, record: Record) -> None:
        batch = record.batch
        before = self.state.loads.workers.get(batch.writer)
        broken = self.state.apply(record)
        if broken is not None:
            assert (broken.position, broken.subject) == (record.position, record.subject)
            assert broken.writer == batch.writer
            assert broken.reason
            self.breaks.append(broken)
            self._doubt(batch.writer)
        late = (batch.epoch, batch.seq) <= self._newest.get(record.subject, (0, 0))
        worker = self.state.loads.workers.get(batch.writer)
        if late:
            return
        if batch.digest != NO_DIGEST:
            self._newest[record.subject] = (batch.epoch, batch.seq)
        if worker is None:
            return
        if batch.epoch > worker.epoch:
            # Its joining is missing: nothing that it says can be placed.
            if any(isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared) for event in batch.events):
                self._cold.add(batch.writer)
        elif batch.epoch == worker.epoch:
            if any(isinstance(event, BlocksCleared) for event in batch.events):
                self._cold.discard(batch.writer)
            if before is None or before.epoch < batch.epoch:
                # It has joined anew: nothing of what it said before counts.
                self._cold.discard(batch.writer)

    def _doubt(self, writer: str) -> None:
        if writer in self.state.loads.workers:
            self._cold.add(writer)
