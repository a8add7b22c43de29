"""The pool log on virtual time: events of workers reach it after one delay, and each router reads it after another."""

from collections import deque
from typing import Any, Final

from headwater.events.log import Record
from headwater.schemas.encoding.envelope import SCHEMA_VERSION, Batch
from headwater.schemas.events.event import Event
from headwater.schemas.events.route import Decision

EPOCH: Final = 1
NEVER: Final = 1 << 62
"""Later than any time in nanoseconds."""


class LogReader:
    """The messages that a router has not read. Each is readable `delay_ns` after it was stored."""

    def __init__(self, delay_ns: int) -> None:
        self.delay_ns = delay_ns
        self.unread: deque[Record] = deque()

    def take(self, now_ns: int) -> Record | None:
        """The next message, if it is readable."""
        if self.unread and self.unread[0].stored_ns + self.delay_ns <= now_ns:
            return self.unread.popleft()
        return None


class VirtualLog:
    """See the module. `delay_ns` is that of workers; routers append without delay. Counts the `decisions` stored."""

    def __init__(self, delay_ns: int = 0) -> None:
        self.decisions = 0
        self._position = 0
        self._delay_ns = delay_ns
        self._sent: deque[Batch[Any]] = deque()
        self._readers: list[LogReader] = []

    def reader(self, delay_ns: int) -> LogReader:
        """A reader from the present position."""
        reader = LogReader(delay_ns)
        self._readers.append(reader)
        return reader

    def copy(self, reader: LogReader) -> LogReader:
        """Another reader of the same messages, with the same delay."""
        copied = self.reader(reader.delay_ns)
        copied.unread.extend(reader.unread)
        return copied

    def remove(self, reader: LogReader) -> None:
        """Keep no more messages for a reader."""
        self._readers.remove(reader)

    def send(self, worker: str, now_ns: int, *events: Event) -> None:
        """A worker publishes events, as one message."""
        self._sent.append(_batch(worker, now_ns, events))

    def append(self, router: str, now_ns: int, event: Event) -> None:
        """A router stores an event."""
        self.store_arrived(now_ns)
        self.decisions += isinstance(event, Decision)
        self._store(_batch(router, now_ns, (event,)), now_ns)

    def store_arrived(self, now_ns: int) -> None:
        """Store the messages of workers that have arrived by now."""
        sent = self._sent
        while sent and sent[0].wall_ns + self._delay_ns <= now_ns:
            batch = sent.popleft()
            self._store(batch, batch.wall_ns + self._delay_ns)

    def readable_ns(self, reader: LogReader) -> int:
        """When its next message is readable; `NEVER` if there is none."""
        if reader.unread:
            return reader.unread[0].stored_ns + reader.delay_ns
        return self._sent[0].wall_ns + self._delay_ns + reader.delay_ns if self._sent else NEVER

    def _store(self, batch: Batch[Any], stored_ns: int) -> None:
        self._position += 1
        record = Record(self._position, "", stored_ns, batch)
        for reader in self._readers:
            reader.unread.append(record)


def _batch(writer: str, now_ns: int, events: tuple[Event, ...]) -> Batch[Any]:
    # Without a chain: no message can be missing here.
    return Batch(SCHEMA_VERSION, writer, EPOCH, 0, now_ns, events)
