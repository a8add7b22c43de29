"""The audit of control commands: what was executed, kept until the pool log confirms it."""

from collections import deque
from typing import Protocol

import structlog

from headwater.schemas.messages.control import ControlReply, ControlRequest

PENDING_MAX = 100
"""Commands kept while the worker has no incarnation, or the log takes none; past that the oldest is dropped."""

_log = structlog.get_logger("headwater.control")


class CommandPublisher(Protocol):
    """Appends executed commands to the pool log."""

    def publish_command(self, request: ControlRequest, reply: ControlReply) -> bool:
        """Queue one for the log; False if the queue is full."""
        ...


class CommandAudit:
    """Executed commands that the pool log has not confirmed, in order.

    An incarnation that ends before the log confirms them leaves them to the next one, so each command is logged at
    least once.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[ControlRequest, ControlReply]] = deque()
        self._published = 0
        """How many of them the present incarnation has queued for the log, from the oldest on."""
        self._publisher: CommandPublisher | None = None

    def begin_incarnation(self, publisher: CommandPublisher) -> None:
        """Publish everything that is pending, and what is recorded from now on."""
        self._publisher, self._published = publisher, 0
        self._publish()

    def end_incarnation(self) -> None:
        """Keep what is recorded from now on for the next incarnation."""
        self._publisher = None

    def record(self, request: ControlRequest, reply: ControlReply) -> None:
        """A command was executed or refused."""
        if len(self._pending) - self._published >= PENDING_MAX:
            dropped, _ = self._pending[self._published]
            del self._pending[self._published]
            _log.warning("audit_record_dropped", command=dropped.command, by=dropped.by)
        self._pending.append((request, reply))
        self._publish()

    def confirm(self) -> None:
        """The log has stored the oldest one that was published."""
        if self._published:
            self._pending.popleft()
            self._published -= 1

    def _publish(self) -> None:
        if self._publisher is None:
            return
        while self._published < len(self._pending):
            if not self._publisher.publish_command(*self._pending[self._published]):
                return
            self._published += 1
