"""What the logs tell of the sides of a roll-out: a fold of decisions and of requests, side by side.

A decision names the revision or the policy that it was made for, and the request log says what became of each attempt. The two are
different logs, so a request that ended is counted once the decisions of all its attempts are known.

A failure is counted where it happened, whether or not the client noticed: a request that a worker lost, or answered with an error, and
that was finished elsewhere, is a failure of the first worker's side. Requests that a worker turned down are none: it is full or
draining.
"""

from collections import OrderedDict, deque
from typing import Final

import msgspec

from headwater.schemas.events.fleet import SplitSubject
from headwater.schemas.events.request import RequestEnded, RequestRouted, RequestStarted, RequestStepped
from headwater.schemas.events.route import Decision

SAMPLES_MAX: Final = 20_000
"""Times kept of each side, the newest ones."""

OPEN_MAX: Final = 100_000
"""Requests and decisions that are followed at once; beyond, the oldest are not counted."""

FAILURES: Final = frozenset({"lost", "timed out"})
"""Causes of a step of the saga that are a failure of the worker."""


class Side(msgspec.Struct):
    """One revision or policy: its attempts that ended or failed, and times of requests in milliseconds."""

    attempts: int = 0
    failures: int = 0
    ttft_ms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    itl_ms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    last_failure: str = ""


class _Attempt(msgspec.Struct):
    """An attempt of a choice. `ttft_ms` 0: no token yet; `failure` says why it failed, `over` that nothing more will become of it."""

    failure: str = ""
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


class _Followed(msgspec.Struct):
    """A request: its attempts by name, and the newest one of each choice."""

    attempts: dict[str, _Attempt] = {}
    newest: dict[int, str] = {}
    ended: bool = False


class Evidence:
    """The evidence since a split applies: decisions made on the log before `since`, its position, count for no side."""

    def __init__(self, subject: SplitSubject, since: int) -> None:
        self.sides: dict[str, Side] = {}
        self._subject = subject
        self._since = since
        self._of: OrderedDict[str, str] = OrderedDict()
        """The side of each decision, by the name of the attempt; "" for none."""
        self._requests: OrderedDict[str, _Followed] = OrderedDict()

    def side(self, name: str) -> Side:
        """A side, empty if nothing is known of it."""
        return self.sides.get(name) or Side()

    def decision(self, event: Decision) -> None:
        """Take a decision of the pool's log."""
        self._of[event.request] = self._side_of(event)
        if len(self._of) > OPEN_MAX:
            self._of.popitem(last=False)

    def _side_of(self, event: Decision) -> str:
        if event.position < self._since or (event.constraints.revision and event.leg != "decode"):
            # Made before, or for a client that chose.
            return ""
        if self._subject == "revision":
            return event.revision
        return event.policy_draw.used if event.policy_draw is not None else ""

    def request(self, event: object) -> None:
        """Take an event of the request log."""
        match event:
            case RequestRouted():
                followed = self._requests.setdefault(event.request, _Followed())
                followed.attempts[event.attempt] = _Attempt()
                followed.newest[event.choice] = event.attempt
                if len(self._requests) > OPEN_MAX:
                    self._requests.popitem(last=False)
            case RequestStarted():
                if (attempt := self._newest(event.request, event.choice)) is not None:
                    attempt.ttft_ms = event.ttft_ms
            case RequestStepped() if event.cause in FAILURES:
                if (attempt := self._newest(event.request, event.choice)) is not None:
                    attempt.failure = attempt.failure or f"{event.request}: {event.reason}"
            case RequestEnded():
                self._end(event)
            case _:
                pass

    def _newest(self, request: str, choice: int) -> _Attempt | None:
        followed = self._requests.get(request)
        return followed.attempts.get(followed.newest.get(choice, "")) if followed is not None else None

    def _end(self, event: RequestEnded) -> None:
        followed = self._requests.get(event.request)
        if followed is None:
            return
        followed.ended = True
        newest = [followed.attempts[name] for name in followed.newest.values()]
        if event.reason == "error":
            for attempt in newest:
                attempt.failure = attempt.failure or f"{event.request}: {event.error}"
        elif len(newest) == 1 and not event.migrations and event.completion_tokens > 1 and newest[0].ttft_ms:
            newest[0].itl_ms = (event.duration_ms - event.ttft_ms) / (event.completion_tokens - 1)

    def settle(self) -> None:
        """Count the requests that ended and whose decisions are known. Call after both logs were read, the request log first."""
        for name in [name for name, one in self._requests.items() if one.ended]:
            followed = self._requests[name]
            if all(attempt in self._of for attempt in followed.attempts):
                del self._requests[name]
                for attempt, found in followed.attempts.items():
                    self._count(self._of.pop(attempt), found)

    def _count(self, name: str, attempt: _Attempt) -> None:
        if not name:
            return
        side = self.sides.setdefault(name, Side())
        side.attempts += 1
        if attempt.failure:
            side.failures += 1
            side.last_failure = attempt.failure
        if attempt.ttft_ms > 0:
            side.ttft_ms.append(attempt.ttft_ms)
        if attempt.itl_ms > 0:
            side.itl_ms.append(attempt.itl_ms)
