"""Gates: what a roll-out must not make worse, what the logs tell of its sides, and the statistics that say whether it does.

Each gate compares the new side with the old one over the requests of the present step, and takes the new side's bad luck into
account: it fails only if the new side is worse than its limit with 95 % confidence, from the first request on, and passes only once
both sides have enough requests. In between it is open, and a roll-out waits.

    errors=P        the rate of failed attempts is at most P percentage points above the old side's. It fails if the lower end of
                    the one-sided 95 % Wilson interval of the new rate is above that.
    ttft_pN=F       the N-th percentile of the time to the first token is at most F times the old side's. It fails if the lower end
    itl_pN=F        of its one-sided 95 % confidence interval, by order statistics, is above that. Likewise the time between tokens.
    answers=S       the share of canned prompts that both sides answer with equal tokens at temperature 0 is at least S.

`Evidence` is a fold of decisions and of requests, side by side. A decision names the revision or the policy that it was made for, and the
request log says what became of each attempt. The two are different logs, so a request that ended is counted once the decisions of all its
attempts are known. A failure is counted where it happened, whether or not the client noticed: a request that a worker lost, or answered with
an error, and that was finished elsewhere, is a failure of the first worker's side. Requests that a worker turned down are none: it is full or
draining.
"""

import math
import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from headwater.ops.config.setting import ConfigError
from headwater.ops.history.series import quantile
from headwater.schemas.events import RequestEnded, RequestRouted, RequestStarted, RequestStepped, SplitSubject
from headwater.schemas.routing import Decision

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
        for name in [name for name, request in self._requests.items() if request.ended]:
            followed = self._requests[name]
            if all(attempt in self._of for attempt in followed.attempts):
                del self._requests[name]
                for attempt, outcome in followed.attempts.items():
                    self._count(self._of.pop(attempt), outcome)

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


Z: Final = 1.6449
"""The normal deviate of one-sided 95 % confidence."""

DEFAULT_GATES: Final[tuple[tuple[str, float], ...]] = (("errors", 1.0), ("ttft_p90", 1.5), ("itl_p90", 1.5))

ANSWERS: Final = "answers"

NAMES: Final = "errors, ttft_p1 to ttft_p99, itl_p1 to itl_p99, answers"

_TIMES: Final = re.compile(r"(ttft|itl)_p([1-9][0-9]?)\Z")

Outcome = Literal["passes", "fails", "open"]


class Verdict(msgspec.Struct, frozen=True):
    """What a gate says, and in words what it compared."""

    gate: str
    outcome: Outcome
    text: str


class Answers(NamedTuple):
    """How canned prompts were answered by both sides: `equal` of `compared`; `differs` describes the first that was not."""

    compared: int
    equal: int
    differs: str = ""


def parse_gates(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """NAME=LIMIT texts as gates; without any the default ones. Raises `ConfigError`."""
    gates: dict[str, float] = {}
    for text in texts:
        name, sign, limit = text.partition("=")
        if name != "errors" and name != ANSWERS and not _TIMES.match(name):
            raise ConfigError(f"--gate {text}: there is no gate {name!r}; gates are: {NAMES}")
        try:
            number = float(limit) if sign else math.nan
        except ValueError:
            number = math.nan
        most = {"errors": 100.0, ANSWERS: 1.0}.get(name, 1_000.0)
        if not 0.0 <= number <= most:
            raise ConfigError(f"--gate {text}: write {name}=LIMIT, with a limit from 0 to {most:g}")
        if name in gates:
            raise ConfigError(f"--gate {text}: {name} has two limits")
        gates[name] = number
    return tuple(gates.items()) or DEFAULT_GATES


def judge(
    gates: Sequence[tuple[str, float]], new: Side, old: Side, samples: int, answers: Answers | None = None
) -> list[Verdict]:
    """What each gate says."""
    return [_judge_one(name, limit, new, old, samples, answers) for name, limit in gates]


def _judge_one(
    name: str, limit: float, new: Side, old: Side, samples: int, answers: Answers | None
) -> Verdict:
    if name == ANSWERS:
        return _judge_answers(limit, answers)
    if name == "errors":
        return _judge_errors(limit, new, old, samples)
    match = _TIMES.match(name)
    if match is None:
        # In the log of a later release: what it asks for cannot be seen here, so it is not passed.
        return Verdict(name, "open", f"this release has no gate {name}")
    times = {"ttft": (new.ttft_ms, old.ttft_ms), "itl": (new.itl_ms, old.itl_ms)}[match[1]]
    return _judge_times(name, limit, times[0], times[1], int(match[2]) / 100, samples)


def _judge_errors(limit: float, new: Side, old: Side, samples: int) -> Verdict:
    least = wilson_low(new.failures, new.attempts)
    base = old.failures / old.attempts if old.attempts else 0.0
    text = (
        f"{_rate(new.failures, new.attempts)} failed against {_rate(old.failures, old.attempts)}; "
        f"limit {limit:g} points more"
    )
    if new.failures and least > base + limit / 100:
        return Verdict("errors", "fails", f"{text}. The last one: {new.last_failure}")
    return _enough("errors", text, new.attempts, old.attempts, samples)


def _rate(failures: int, attempts: int) -> str:
    return f"{failures} of {attempts} attempts" if attempts else "none of 0 attempts"


def _judge_times(
    name: str, limit: float, new: Sequence[float], old: Sequence[float], share: float, samples: int
) -> Verdict:
    base, value = quantile(list(old), share), quantile(list(new), share)
    if base is None or value is None:
        return _enough(name, "no times of both sides yet", len(new), len(old), samples)
    text = f"{value:.1f} ms against {base:.1f} ms ({value / base:.2f} times); limit {limit:g} times"
    least = quantile_low(new, share)
    if len(old) >= min(samples, len(new)) and least is not None and least > limit * base:
        return Verdict(name, "fails", text)
    return _enough(name, text, len(new), len(old), samples)


def _judge_answers(limit: float, answers: Answers | None) -> Verdict:
    if answers is None:
        return Verdict(ANSWERS, "open", "the canned prompts were not sent yet")
    if not answers.compared:
        return Verdict(ANSWERS, "open", f"no canned prompt was answered by both sides: {answers.differs}")
    share = answers.equal / answers.compared
    text = f"{answers.equal} of {answers.compared} canned prompts answered alike ({share:.0%}); limit {limit:.0%}"
    differs = f". {answers.differs}" if answers.differs else ""
    return Verdict(ANSWERS, "passes" if share >= limit else "fails", text + differs)


def _enough(name: str, text: str, new: int, old: int, samples: int) -> Verdict:
    """Passed, if both sides have enough; else open, and what is missing."""
    lacking = [
        f"{side} side {count} of {samples} requests"
        for side, count in (("new", new), ("old", old))
        if count < samples
    ]
    if lacking:
        return Verdict(name, "open", f"{text}; too few to judge by: {', '.join(lacking)}")
    return Verdict(name, "passes", text)


def wilson_low(failures: int, attempts: int) -> float:
    """The lower end of the one-sided 95 % Wilson interval of a rate; 0 without attempts."""
    if not attempts:
        return 0.0
    rate, square = failures / attempts, Z * Z
    centre = rate + square / (2 * attempts)
    spread = Z * math.sqrt(rate * (1 - rate) / attempts + square / (4 * attempts * attempts))
    return max(0.0, (centre - spread) / (1 + square / attempts))


def quantile_low(values: Sequence[float], share: float) -> float | None:
    """The lower end of the one-sided 95 % confidence interval of a quantile, by order statistics; None of too few values.

    The greatest k-th value for which fewer than k of the values are below the quantile with a probability of at most 5 %.
    """
    count = len(values)
    below, rank = 0.0, 0
    for number in range(count + 1):
        below += _binomial(number, count, share)
        if below > 0.05:
            break
        rank = number + 1
    return sorted(values)[rank - 1] if 0 < rank <= count else None


def _binomial(number: int, count: int, share: float) -> float:
    """The probability that `number` of `count` values are below the quantile."""
    log = math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)
    return math.exp(log + number * math.log(share) + (count - number) * math.log(1 - share))


def summary(verdicts: Sequence[Verdict], outcome: Outcome) -> str:
    """The gates of one outcome with their words."""
    return "; ".join(f"{verdict.gate}: {verdict.text}" for verdict in verdicts if verdict.outcome == outcome)


def sizes(sides: Mapping[str, Side]) -> str:
    """How many attempts each side has, for a line of progress."""
    return ", ".join(f"{name} {side.attempts}" for name, side in sorted(sides.items())) or "no requests"
