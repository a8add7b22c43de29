"""Rates, latencies and the load of workers over a window of time that ends at a moment, in equal columns."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.ops.history.fleet import SECOND_NS, Samples
from headwater.ops.history.requests import Request, RequestTable

F64 = NDArray[np.float64]

REPORT_NS_MAX: Final = 30_000_000_000
"""A load report describes its worker until the next one, but at most this long: an idle worker reports seldom."""

UNITS: Final = {
    "requests_per_s": "1/s",
    "tokens_per_s": "tokens/s",
    "errors_per_s": "1/s",
    "migrations_per_s": "1/s",
    "ttft_p50_ms": "ms",
    "ttft_p90_ms": "ms",
    "ttft_p99_ms": "ms",
    "duration_p50_ms": "ms",
    "duration_p99_ms": "ms",
    "queue_p99_ms": "ms",
    "hit_rate": "share",
    "predicted_hit_rate": "share",
    "regret_ms": "ms",
    "running": "requests",
    "waiting": "requests",
    "kv_used": "share",
}
"""The series and their units. Latencies are those of requests that ended (TTFT: that started) in a column; regret is the
median of `regret_ms`."""


class Window(NamedTuple):
    """A span of time in ns, in `columns` of equal width."""

    from_ns: int
    to_ns: int
    columns: int

    @property
    def step_ns(self) -> float:
        """The width of a column."""
        return (self.to_ns - self.from_ns) / self.columns

    def columns_of(self, times_ns: Sequence[int]) -> list[int]:
        """The columns of times after the window's start."""
        after = np.array(times_ns, np.int64) - self.from_ns - 1
        return np.clip((after / self.step_ns).astype(np.int64), 0, self.columns - 1).tolist()  # type: ignore[no-any-return]  # of integers


class Lane(NamedTuple):
    """The load of a worker in each column; NaN where no report describes it."""

    running: F64
    waiting: F64
    used: F64


def lane(samples: Samples, window: Window, left_ns: int = 0) -> Lane:
    """A worker's load over a window, from its samples in order. After `left_ns`, when it left, it has none."""
    ends = window.from_ns + np.arange(1, window.columns + 1) * window.step_ns
    times = np.array(samples.times, np.int64)
    # A later sample may have taken the place of one of the second in which the window ends.
    times = times[: np.searchsorted(times, window.to_ns // SECOND_NS * SECOND_NS)]
    if not len(times):
        nothing = np.full(window.columns, np.nan)
        return Lane(nothing, nothing, nothing)
    at = np.searchsorted(times, ends, side="right") - 1
    reported = times[np.maximum(at, 0)]
    known = (at >= 0) & (ends - reported <= REPORT_NS_MAX + window.step_ns)
    if left_ns:
        known &= ~((reported <= left_ns) & (left_ns < ends))

    def column(values: Any) -> F64:
        return np.where(known, np.array(values, np.float64)[np.maximum(at, 0)], np.nan)

    return Lane(column(samples.running), column(samples.waiting), np.round(column(samples.used), 4))


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the values does not exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(np.ceil(share * len(ordered))) - 1))]


class Rates(NamedTuple):
    """What a window's requests came to. Rates are per second; times in ms; None where no request tells."""

    requests_per_s: float
    tokens_per_s: float
    errors_per_s: float
    migrations_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    hit_rate: float | None


def hit_rate(rows: Sequence[Request]) -> float | None:
    """The share of prompt tokens that engines found cached, of the requests that say so."""
    known = [
        (row.found_tokens, row.prompt_tokens) for row in rows if row.found_tokens >= 0 and row.prompt_tokens
    ]
    total = sum(prompt for _, prompt in known)
    return sum(found for found, _ in known) / total if total else None


def itl_ms(row: Request) -> float | None:
    """The mean time between two tokens of a request that ended."""
    gaps = row.completion_tokens - row.choices
    return (row.duration_ms - row.ttft_ms) / gaps * row.choices if gaps > 0 and row.ttft_ms else None


def rates(table: RequestTable, from_ns: int, to_ns: int) -> Rates:
    """The rates of the requests of a span of time."""
    seconds = max(1e-9, (to_ns - from_ns) / 1e9)
    accepted, ended = table.accepted_between(from_ns, to_ns), table.ended_between(from_ns, to_ns)
    ttft = [row.ttft_ms for row in ended if row.ttft_ms]
    gaps = [gap for row in ended if (gap := itl_ms(row)) is not None]
    return Rates(
        len(accepted) / seconds,
        sum(row.completion_tokens for row in ended) / seconds,
        sum(row.reason == "error" for row in ended) / seconds,
        sum(row.migrations for row in ended) / seconds,
        quantile(ttft, 0.5),
        quantile(ttft, 0.99),
        quantile(gaps, 0.5),
        hit_rate([row for row in accepted if row.started_ns and row.started_ns <= to_ns]),
    )


class Selection(NamedTuple):
    """The requests that were accepted, that started, and that ended in a window."""

    accepted: Sequence[Request]
    started: Sequence[Request]
    ended: Sequence[Request]

    def only(self, keep: Callable[[Request], bool]) -> "Selection":
        """Some of them."""
        return Selection(*([row for row in rows if keep(row)] for rows in self))


def selection(table: RequestTable, from_ns: int, to_ns: int) -> Selection:
    """The requests of a span of time."""
    # Requests that started in it were accepted in it, or not long before.
    earlier = table.accepted_between(from_ns - 10 * 60 * 1_000_000_000, to_ns)
    return Selection(
        table.accepted_between(from_ns, to_ns),
        [row for row in earlier if from_ns < row.started_ns <= to_ns],
        table.ended_between(from_ns, to_ns),
    )


def request_series(rows: Selection, window: Window) -> dict[str, list[float | None]]:
    """The series of `UNITS` that requests give."""
    seconds = window.step_ns / 1e9
    accepted = _by_column(rows.accepted, window, "accepted_ns")
    ended = _by_column(rows.ended, window, "ended_ns")
    started = _by_column(rows.started, window, "started_ns")

    def each(
        rows: Sequence[list[Request]], value: Callable[[list[Request]], float | None]
    ) -> list[float | None]:
        return [value(column) for column in rows]

    def times(share: float, name: str) -> Callable[[list[Request]], float | None]:
        return lambda column: quantile([value for row in column if (value := getattr(row, name))], share)

    return {
        "requests_per_s": each(accepted, lambda column: len(column) / seconds),
        "tokens_per_s": each(ended, lambda column: sum(row.completion_tokens for row in column) / seconds),
        "errors_per_s": each(ended, lambda column: sum(row.reason == "error" for row in column) / seconds),
        "migrations_per_s": each(ended, lambda column: sum(row.migrations for row in column) / seconds),
        "ttft_p50_ms": each(started, times(0.5, "ttft_ms")),
        "ttft_p90_ms": each(started, times(0.9, "ttft_ms")),
        "ttft_p99_ms": each(started, times(0.99, "ttft_ms")),
        "duration_p50_ms": each(ended, times(0.5, "duration_ms")),
        "duration_p99_ms": each(ended, times(0.99, "duration_ms")),
        "queue_p99_ms": each(
            started, lambda column: quantile([float(row.waited_ms) for row in column], 0.99)
        ),
        "hit_rate": each(started, hit_rate),
        "predicted_hit_rate": each(started, _predicted),
        "regret_ms": each(started, _regret),
    }


def load_series(lanes: Sequence[Lane], window: Window) -> dict[str, list[float]]:
    """The series of `UNITS` that load reports give: sums over workers, and the mean share of KV in use; NaN where no report tells."""
    if not lanes:
        nothing = [float("nan")] * window.columns
        return {"running": nothing, "waiting": nothing, "kv_used": nothing}
    running, waiting, used = (np.array([one[number] for one in lanes]) for number in range(3))
    known = ~np.isnan(running)
    count = known.sum(axis=0)

    def total(values: F64) -> F64:
        return np.where(count > 0, np.where(known, values, 0.0).sum(axis=0), np.nan)

    return {
        "running": total(running).tolist(),
        "waiting": total(waiting).tolist(),
        "kv_used": (total(used) / np.maximum(count, 1)).tolist(),
    }


class Usage(NamedTuple):
    """What requests came to. `open` are those at the end of the span, the tokens those of the requests that ended in it."""

    accepted: int
    ended: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    open: int


def usage(rows: Selection, opened: Sequence[Request]) -> Usage:
    """The usage by the requests of a span of time, of which `opened` are open at its end."""
    return Usage(
        len(rows.accepted),
        len(rows.ended),
        sum(row.reason == "error" for row in rows.ended),
        sum(row.prompt_tokens for row in rows.ended),
        sum(row.cached_tokens for row in rows.ended),
        sum(row.completion_tokens for row in rows.ended),
        len(opened),
    )


def _by_column(rows: Sequence[Request], window: Window, time: str) -> list[list[Request]]:
    found: list[list[Request]] = [[] for _ in range(window.columns)]
    for row, column in zip(rows, window.columns_of([getattr(row, time) for row in rows]), strict=True):
        found[column].append(row)
    return found


def _predicted(rows: list[Request]) -> float | None:
    known = [row for row in rows if row.expected_tokens >= 0 and row.prompt_tokens]
    total = sum(row.prompt_tokens for row in known)
    return sum(row.expected_tokens for row in known) / total if total else None


def regret_ms(row: Request) -> float | None:
    """How much longer the first token took than the decision that led to it expected, without waits in the queue; None if either is unknown."""
    return row.ttft_ms - row.waited_ms - row.expected_ms if row.expected_ms and row.ttft_ms else None


def _regret(rows: list[Request]) -> float | None:
    return quantile([regret for row in rows if (regret := regret_ms(row)) is not None], 0.5)
