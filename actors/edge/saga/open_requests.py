"""The requests of an edge that have not ended, in the request log.

An edge that dies leaves requests that were accepted and never ended. The next incarnation of the same name ends them:
it first appends a message of its own, which fences the dead incarnation, then reads back to the position that the dead
one recorded for its open requests, and ends those it finds. So every accepted request has exactly one terminal event,
even if its client never received one.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from headwater.events.ports import NOTHING, Log
from headwater.events.writer import PENDING_EVENTS_MAX, Writer, stored
from headwater.schemas import subjects
from headwater.schemas.clock import Clock
from headwater.schemas.events import Event
from headwater.schemas.events.request import (
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestsOpen,
)

NONE_OPEN: Final = -1
ACCEPT_PENDING_MAX: Final = PENDING_EVENTS_MAX * 3 // 4
"""The limit of unwritten events, beyond which no request is accepted, so that terminal events still find room."""

_log = structlog.get_logger("headwater.ledger")


class OpenRequests:
    """Writes the request log of one incarnation of an edge."""

    def __init__(
        self, log: Log, ns: str, edge: str, epoch: int, clock: Clock, *, probe_s: float = 0.0
    ) -> None:
        self._log = log
        self._edge = edge
        self._epoch = epoch
        self._clock = clock
        self._open: dict[str, int] = {}
        self._floor: int | None = None
        subject = subjects.request_subject(ns, edge)
        self.writer = Writer(log, subject, edge, epoch, clock, probe_s=probe_s, stamp=self._stamp)

    @property
    def takes_requests(self) -> bool:
        """True while the buffer has room for the events of another request."""
        return self.writer.pending < ACCEPT_PENDING_MAX

    def write(self, event: Event) -> None:
        """Write an event of a request. Never blocks."""
        if not self.writer.offer(event):
            _log.error(
                "request_event_lost", event_kind=type(event).__name__, request=getattr(event, "request", "")
            )

    async def open(self) -> int:
        """Fence former incarnations and end the requests that they left open; returns their number.

        The writer's `run` is started by the caller afterwards.
        """
        subject = self.writer.subject
        last = (await self._log.bounds()).last
        before = await self._log.newest(subject)
        since = await self._open_since(before.position) if before != NOTHING else NONE_OPEN
        # Until it is fenced, the former incarnation may append further messages.
        self._floor = since if since != NONE_OPEN else before.position if before != NOTHING else last
        entries = await self.writer.first_entries()
        position = await stored(lambda: self._log.append(*entries), self._clock, subject)
        self.writer.position = position
        left = await self._left_open(self._floor, position)
        self._open = dict.fromkeys(left, self._floor)
        self._floor = None
        for request, tokens in left.items():
            _log.warning("request_left_open", request=request, edge=self._edge)
            self.write(RequestEnded(request, "error", tokens, 0, 0, 0.0, 0.0, "the edge that served it died"))
        return len(left)

    async def _open_since(self, position: int) -> int:
        """The position that the newest message of the subject records; the start of the log if that is unreadable."""
        async for piece in self._log.read(position - 1, follow=False):
            for record in piece.records:
                if record.position == position:
                    marks = [event for event in record.batch.events if isinstance(event, RequestsOpen)]
                    return marks[-1].since if marks else NONE_OPEN
        return 0

    async def _left_open(self, since: int, until: int) -> dict[str, int]:
        """Requests that earlier incarnations accepted and did not end, with their last known number of tokens."""
        left: dict[str, int] = {}
        async for piece in self._log.read(since, follow=False):
            for record in piece.records:
                if record.subject != self.writer.subject or record.position > until:
                    continue
                for event in record.batch.events:
                    match event:
                        case RequestAccepted(request=request):
                            left[request] = 0
                        case RequestCheckpoint(request=request, emitted_tokens=tokens) if request in left:
                            left[request] = max(left[request], tokens)
                        case RequestEnded(request=request):
                            left.pop(request, None)
                        case _:
                            pass
        return left

    def _stamp(self, events: Sequence[Event]) -> Event:
        """The position of the oldest request that is open after this message."""
        for event in events:
            if isinstance(event, RequestAccepted):
                self._open[event.request] = self.writer.position
            elif isinstance(event, RequestEnded):
                self._open.pop(event.request, None)
        known = [*self._open.values()] if self._floor is None else [self._floor, *self._open.values()]
        known = [since for since in known if since != NONE_OPEN]
        return RequestsOpen(min(known, default=NONE_OPEN))
