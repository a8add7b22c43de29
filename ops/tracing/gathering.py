"""Requests gathered from both logs until they end, and which of them have their traces sent. Pure: no clock, no network."""

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from headwater.events.ports import Record
from headwater.ops.config.trace import TraceSettings
from headwater.ops.history.request_spans import Stamped
from headwater.ops.history.requests import request_of
from headwater.ops.history.trace_spans import Routing, Trace, spans_of
from headwater.schemas.events.request import RequestAccepted, RequestCheckpoint, RequestEnded
from headwater.schemas.events.route import Decision

HELD_MAX: Final = 20_000
"""Open requests, and requests of which only decisions are known, that are held each; beyond, the oldest is left out."""

Reason = Literal["", "sampled", "error", "migrated", "slow"]
"""Why the trace of a request is sent; "": it is not."""


class Held(msgspec.Struct):
    """An open request: its edge and its events so far."""

    request: str
    edge: str
    events: list[Stamped]

    @property
    def position(self) -> int:
        """Where its events begin in the request log."""
        return self.events[0].position


class Ended(NamedTuple):
    """A request that has ended, at this position of the request log, and why its trace is sent."""

    held: Held
    position: int
    reason: Reason


class Gathering:
    """The open requests, and the decisions about them. `left_out` counts requests that were open for too long."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._open: dict[str, Held] = {}
        self._decisions: dict[str, list[Routing]] = {}
        self.left_out = 0

    def requests(self, record: Record) -> Iterator[Ended]:
        """Take a message of the request log; yields the requests that it ends."""
        for event in record.batch.events:
            # The number of tokens so far is no part of a trace.
            if isinstance(event, RequestCheckpoint):
                continue
            name = getattr(event, "request", "")
            stamped = Stamped(record.stored_ns, record.position, event)
            if isinstance(event, RequestAccepted):
                self._open[name] = Held(name, record.batch.writer, [stamped])
                self.left_out += _bound(self._open)
            elif (held := self._open.get(name)) is not None:
                held.events.append(stamped)
                if isinstance(event, RequestEnded):
                    del self._open[name]
                    yield Ended(held, record.position, reason_of(held.events, self._settings))

    def routes(self, record: Record) -> None:
        """Take a message of a pool's log."""
        for event in record.batch.events:
            if isinstance(event, Decision):
                made = Routing(record.batch.writer, record.position, event)
                self._decisions.setdefault(request_of(event.request), []).append(made)
        _bound(self._decisions)

    def finish(self, ended: Iterable[Ended]) -> list[tuple[Ended, Trace]]:
        """The traces of those whose traces are sent. What is held for any of them is given up."""
        found = []
        for one in ended:
            held = one.held
            made = self._decisions.pop(held.request, [])
            if one.reason:
                trace = spans_of(held.request, held.edge, held.events, made)
                found.append((one, trace))
        return found

    def since(self, position: int) -> int:
        """The position after which all events of open requests are, given that up to which the log was read."""
        return next(iter(self._open.values())).position - 1 if self._open else position

    def forget(self) -> None:
        """Give up all open requests: a part of the log is missing."""
        self.left_out += len(self._open)
        self._open.clear()


def _bound(held: dict[str, Held] | dict[str, list[Routing]]) -> int:
    """Drop the oldest beyond `HELD_MAX`; returns how many."""
    excess = len(held) - HELD_MAX
    for _ in range(excess):
        held.pop(next(iter(held)))
    return max(0, excess)


def reason_of(events: list[Stamped], settings: TraceSettings) -> Reason:
    """Why the trace of a request that was accepted and has ended is sent."""
    accepted, ended = events[0].event, events[-1].event
    assert isinstance(accepted, RequestAccepted)
    assert isinstance(ended, RequestEnded)
    if ended.reason == "error":
        return "error"
    if ended.migrations:
        return "migrated"
    if (
        settings.slow_s
        and accepted.prepare_ms + (ended.ttft_ms or ended.duration_ms) >= settings.slow_s * 1000
    ):
        return "slow"
    return "sampled" if accepted.context.is_sampled(accepted.request, settings.sample) else ""
