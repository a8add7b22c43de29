"""The requests of a namespace as the request log and the decisions of a pool describe them: a row each, which can be shown as of any time."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from sys import intern
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from headwater.events.ports import Record
from headwater.ops.history.columns import Columns, PrefixUses
from headwater.schemas.events import (
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestStarted,
    RequestStepped,
    SagaState,
)
from headwater.schemas.routing import Decision

ROWS_MAX: Final = 200_000
"""Requests kept; beyond, the oldest ones are dropped."""

EARLY_MAX: Final = 10_000
"""Decisions kept whose request is not in the table yet."""

_ATTEMPT: Final = re.compile(r"(.+?)-\d+-\d+(?:-e\d+-\d+)?")

ValueT = TypeVar("ValueT")

State = Literal["all", "open", "ended", "failed", "migrated", "slow"]
Order = Literal["time", "ttft", "duration", "tokens", "waited"]

SLOW_SHARE: Final = 0.95
"""Requests are slow whose time to the first token is above that of this share of the window's requests."""


class StoredDecision(NamedTuple):
    """A decision of a router (its name and epoch) as the pool's log has it: at a position, stored at `stored_ns`."""

    router: tuple[str, int]
    position: int
    stored_ns: int
    decision: Decision


def decisions_in(record: Record) -> Iterator[StoredDecision]:
    """The decisions of one message."""
    router = record.batch.writer, record.batch.epoch
    for event in record.batch.events:
        if isinstance(event, Decision):
            yield StoredDecision(router, record.position, record.stored_ns, event)


class Decided(NamedTuple):
    """A decision, the position at which the pool log stores it, and the block size of its worker."""

    position: int
    decision: Decision
    block_size: int


class Request(msgspec.Struct):
    """One request. Times are the log server's, in ns; 0 is "not yet". `steps` are (time, state of the saga) in order, `beats` when
    it was known to have generated more.

    `log_position` and `end_position` are those of its first and last event in the request log, on `subject`.
    `decisions` are the positions at which the pool log stores its decisions, `waits` how long each waited in the queue (ms).
    `attempts` are the names of those that were followed until the first token, without the request's: decode legs first, and last
    the one that led to that token. Expected values are of this one: `expected_ms` to the first token, and tokens of the prompt that
    the router knew to be cached. `waited_ms` is the longest wait of all of them. `noted` has decisions until the first token.
    """

    id: str
    accepted_ns: int
    endpoint: str
    model: str
    prompt_tokens: int
    max_tokens: int
    stream: bool
    choices: int
    media: int
    subject: str
    log_position: int
    end_position: int = 0
    trace: str = ""
    steps: tuple[tuple[int, SagaState], ...] = ()
    workers: tuple[tuple[int, str], ...] = ()
    failures: tuple[int, ...] = ()
    decisions: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    beats: tuple[int, ...] = ()
    attempts: tuple[str, ...] = ()
    noted: tuple[Decided, ...] = ()
    started_ns: int = 0
    ttft_ms: float = 0.0
    found_tokens: int = -1
    ended_ns: int = 0
    reason: str = ""
    error: str = ""
    completion_tokens: int = 0
    cached_tokens: int = 0
    migrations: int = 0
    duration_ms: float = 0.0
    waited_ms: int = 0
    tenant: int = 0
    priority: int = 0
    expected_ms: float = 0.0
    expected_tokens: int = -1

    @property
    def is_here(self) -> bool:
        """Is it one of the pool's requests? The request log has those of all pools; before it is routed nobody knows of which it is."""
        return bool(self.decisions) or not self.workers

    def state_at(self, now_ns: int) -> SagaState:
        """The state of its saga at a time."""
        if self.ended_ns and self.ended_ns <= now_ns:
            return "ended"
        return _latest(self.steps, now_ns, "routing")

    def since_ns(self, now_ns: int) -> int:
        """When the log heard of it last, at or before a time."""
        steps = (time_ns for time_ns, _ in self.steps)
        times = (self.accepted_ns, self.started_ns, self.ended_ns, *steps, *self.beats)
        return max(time_ns for time_ns in times if time_ns <= now_ns)

    def is_open(self, now_ns: int) -> bool:
        """Was it accepted and not ended at a time?"""
        return self.accepted_ns <= now_ns and not (self.ended_ns and self.ended_ns <= now_ns)

    def worker_at(self, now_ns: int) -> str:
        """The worker that it was on at a time; "" before the first."""
        return _latest(self.workers, now_ns, "")

    def waited_at(self, position: int) -> int:
        """Its longest wait in the router's queue, of the decisions up to a position of the pool log, in ms."""
        decided_waits = zip(self.decisions, self.waits, strict=True)
        return max((waited for decided, waited in decided_waits if decided <= position), default=0)


def _latest(values: tuple[tuple[int, ValueT], ...], now_ns: int, before: ValueT) -> ValueT:
    """The last of some values with their times, in order, at a time."""
    at = bisect_right(values, now_ns, key=itemgetter(0))
    return values[at - 1][1] if at else before


ACCEPTED: Final = np.dtype([("accepted_ns", "i8"), ("here", "?"), ("model", "i4"), ("tenant", "i8")])

STARTED: Final = np.dtype(
    [
        ("started_ns", "i8"),
        ("accepted_ns", "i8"),
        ("here", "?"),
        ("number", "i8"),
        ("model", "i4"),
        ("tenant", "i8"),
        ("worker", "i4"),
        ("ttft_ms", "f8"),
        ("waited_ms", "f8"),
        ("regret_ms", "f8"),
        ("prompt_tokens", "i8"),
        ("found_tokens", "i8"),
        ("expected_tokens", "i8"),
    ]
)
"""`number` is the request's position in its log, `worker` which one it started on; `regret_ms` is NaN and tokens are -1 where they are unknown."""

ENDED: Final = np.dtype(
    [
        ("ended_ns", "i8"),
        ("accepted_ns", "i8"),
        ("here", "?"),
        ("number", "i8"),
        ("model", "i4"),
        ("tenant", "i8"),
        ("failed", "?"),
        ("migrations", "i8"),
        ("ttft_ms", "f8"),
        ("gap_ms", "f8"),
        ("duration_ms", "f8"),
        ("prompt_tokens", "i8"),
        ("cached_tokens", "i8"),
        ("completion_tokens", "i8"),
    ]
)
"""`gap_ms` is the mean time between two tokens, NaN where it is unknown."""


class RequestTable:
    """The requests in the order of their acceptance, by id, and as columns in the order of their acceptance, start and end.

    Models and workers are numbers in columns, those of `names`.
    """

    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self.by_id: dict[str, Request] = {}
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self.accepted = Columns(ACCEPTED, self._accepted_line)
        self.started = Columns(STARTED, self._started_line)
        self.ended = Columns(ENDED, self._ended_line)
        self.dropped_ns = 0
        """When the newest request was accepted that is not kept any more."""
        self.uses = PrefixUses()
        self._open: dict[str, Request] = {}
        self._longest_ns = 0
        self._early: dict[str, list[Decided]] = {}
        self._rows_max = rows_max

    @property
    def rows(self) -> list[Request]:
        """All, in the order of their acceptance."""
        return self.accepted.rows

    def number_of(self, name: str) -> int:
        """The number of a model or worker in columns."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def _accepted_line(self, row: Request) -> tuple[Any, ...]:
        return row.accepted_ns, row.is_here, self.number_of(row.model), row.tenant

    def _started_line(self, row: Request) -> tuple[Any, ...]:
        regret = regret_ms(row)
        return (
            row.started_ns,
            row.accepted_ns,
            row.is_here,
            row.log_position,
            self.number_of(row.model),
            row.tenant,
            self.number_of(row.worker_at(row.started_ns)),
            row.ttft_ms,
            row.waited_ms,
            math.nan if regret is None else regret,
            row.prompt_tokens,
            row.found_tokens,
            row.expected_tokens,
        )

    def _ended_line(self, row: Request) -> tuple[Any, ...]:
        gap = itl_ms(row)
        return (
            row.ended_ns,
            row.accepted_ns,
            row.is_here,
            row.log_position,
            self.number_of(row.model),
            row.tenant,
            row.reason == "error",
            row.migrations,
            row.ttft_ms,
            math.nan if gap is None else gap,
            row.duration_ms,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
        )

    def fold(self, record: Record) -> None:
        """Take the events of one message of the request log."""
        now_ns = record.stored_ns
        for event in record.batch.events:
            if isinstance(event, RequestAccepted):
                self._accept(event, record)
                continue
            row = self.by_id.get(getattr(event, "request", ""))
            if row is None:
                continue
            match event:
                case RequestRouted():
                    row.steps += ((now_ns, "prefill" if event.leg == "prefill" else "decode"),)
                    row.workers += ((now_ns, intern(event.worker)),)
                    self.accepted.change(row)
                    if not row.started_ns:
                        new_attempts = (intern(attempt_of(event.attempt, row.id)),)
                        row.attempts = (
                            new_attempts + row.attempts
                            if event.leg == "decode"
                            else row.attempts + new_attempts
                        )
                case RequestPrefilled():
                    row.steps += ((now_ns, "handoff"),)
                case RequestStarted():
                    if not row.started_ns:
                        row.started_ns, row.ttft_ms = now_ns, event.ttft_ms
                        row.found_tokens = event.cached_tokens
                        _settle(row, event.choice)
                        self.started.add(row)
                case RequestStepped():
                    row.steps += ((now_ns, event.after),)
                    row.failures += (now_ns,)
                case RequestCheckpoint():
                    row.beats += (now_ns,)
                case RequestEnded():
                    row.end_position = row.end_position or record.position
                    self._end(row, event, now_ns)
                case _:
                    pass

    def _accept(self, event: RequestAccepted, record: Record) -> None:
        if event.request in self.by_id:
            return
        row = Request(
            event.request,
            record.stored_ns,
            intern(event.endpoint),
            intern(event.model),
            event.prompt_tokens,
            event.max_tokens,
            event.stream,
            event.choices,
            len(event.media),
            intern(record.subject),
            record.position,
            trace=event.trace,
            tenant=event.tenant,
            priority=event.priority,
        )
        self.accepted.add(row)
        self.by_id[event.request] = self._open[event.request] = row
        for decided in self._early.pop(event.request, ()):
            _note_decision(row, decided)
        if len(self.rows) > self._rows_max:
            self._drop(self._rows_max // 10)

    def _end(self, row: Request, event: RequestEnded, now_ns: int) -> None:
        if row.ended_ns:
            return
        row.ended_ns, row.reason, row.error = now_ns, intern(event.reason), event.error
        row.completion_tokens, row.cached_tokens = event.completion_tokens, event.cached_tokens
        row.migrations, row.duration_ms = event.migrations, event.duration_ms
        row.noted = ()
        if not row.ttft_ms:
            row.ttft_ms = event.ttft_ms
            if row.started_ns:
                self.started.change(row)
        self.ended.add(row)
        self._open.pop(row.id, None)
        self._longest_ns = max(self._longest_ns, now_ns - row.accepted_ns)

    def decide(self, decision: Decision, position: int, block_size: int) -> None:
        """Take a decision that is stored at a position of the pool log."""
        self.uses.decide(decision, position)
        request = request_of(decision.request)
        decided = Decided(position, decision, block_size)
        row = self.by_id.get(request)
        if row is not None:
            _note_decision(row, decided)
            self.accepted.change(row)
            if row.started_ns:
                self.started.change(row)
            if row.ended_ns:
                self.ended.change(row)
            return
        # Of the two logs, either may be read first.
        self._early.setdefault(request, []).append(decided)
        while len(self._early) > EARLY_MAX:
            del self._early[next(iter(self._early))]

    def _drop(self, count: int) -> None:
        """Drop the oldest requests."""
        for row in self.rows[:count]:
            self.by_id.pop(row.id, None)
            self._open.pop(row.id, None)
        self.dropped_ns = self.rows[count - 1].accepted_ns
        for columns in (self.accepted, self.started, self.ended):
            columns.keep(lambda row: row.id in self.by_id)

    def accepted_between(self, from_ns: int, to_ns: int, most: int | None = None) -> Sequence[Request]:
        """The requests that were accepted after one time and until another, in order; of more than `most` some, evenly spaced."""
        return self.accepted.rows_between(from_ns, to_ns, most)

    def last_failed(self, now_ns: int) -> Request:
        """The request that failed last, at or before a time, of those that did."""
        lines = self.ended.lines()[: self.ended.places_between(0, now_ns).stop]
        failed_request: Request = self.ended.rows[int(np.flatnonzero(lines["failed"] & lines["here"])[-1])]
        return failed_request

    def open_at(self, now_ns: int) -> list[Request]:
        """The requests that are accepted and not ended at a time, the oldest first."""
        ended = self.ended.rows
        later = bisect_right(ended, now_ns, key=attrgetter("ended_ns"))
        # Of the requests that ended later, and of those that were accepted as long before as any lasted, the fewer.
        first_ns = min([now_ns - self._longest_ns, *(row.accepted_ns for row in self._open.values())])
        lately = self.accepted_between(first_ns - 1, now_ns)
        if len(lately) < len(ended) - later:
            return [row for row in lately if not 0 < row.ended_ns <= now_ns]
        open_requests = [row for row in ended[later:] if row.accepted_ns <= now_ns and row.is_here]
        open_requests += [row for row in self._open.values() if row.accepted_ns <= now_ns and row.is_here]
        return sorted(open_requests, key=attrgetter("accepted_ns"))


def itl_ms(row: Request) -> float | None:
    """The mean time between two tokens of a request that ended."""
    gaps = row.completion_tokens - row.choices
    return (row.duration_ms - row.ttft_ms) / gaps * row.choices if gaps > 0 and row.ttft_ms else None


def regret_ms(row: Request) -> float | None:
    """How much longer the first token took than the decision that led to it expected, without waits in the queue; None if either is unknown."""
    return row.ttft_ms - row.waited_ms - row.expected_ms if row.expected_ms and row.ttft_ms else None


def request_of(decision: str) -> str:
    """The request that a decision is about: its name has the choice, the attempt and perhaps an item of media behind the request's id."""
    match = _ATTEMPT.fullmatch(decision)
    return str(match[1]) if match is not None else decision


def is_attempt_of(name: str, request: str) -> bool:
    """Is it the name of a request, or of one of its decisions, which have the choice and the attempt behind that?"""
    return name == request or name.startswith(request + "-")


def attempt_of(decision: str, request: str) -> str:
    """What a decision's name has behind that of its request: the choice and the attempt."""
    return decision.removeprefix(request)


def _note_decision(row: Request, decided: Decided) -> None:
    row.decisions += (decided.position,)
    row.waits += (decided.decision.waited_ms,)
    if not row.started_ns and not row.ended_ns:
        row.noted += (decided,)
        _expect(row, decided)
    elif attempt_of(decided.decision.request, row.id) in row.attempts:
        _expect(row, decided)


def _settle(row: Request, choice: int) -> None:
    """The first token came, of a choice: what was expected of it is what its own attempt expected, whichever log was read first."""
    row.attempts = tuple(sorted(row.attempts, key=lambda attempt: attempt.startswith(f"-{choice}-")))
    noted, row.noted = row.noted, ()
    row.expected_ms, row.expected_tokens, row.waited_ms = 0.0, -1, 0
    for decided in noted:
        if attempt_of(decided.decision.request, row.id) in row.attempts:
            _expect(row, decided)


def _expect(row: Request, decided: Decided) -> None:
    """Take what a decision expected of the first token."""
    decision = decided.decision
    row.waited_ms = max(row.waited_ms, decision.waited_ms)
    if row.started_ns and attempt_of(decision.request, row.id) != row.attempts[-1]:
        return
    if decision.leg != "decode" and "encode" not in decision.constraints.needs:
        chosen = decision.chosen
        row.expected_ms = chosen.ttft_ms if chosen.prefill_ms else 0.0
        row.expected_tokens = chosen.cached_blocks * decided.block_size
        row.prompt_tokens = row.prompt_tokens or decision.prompt_tokens
