"""Rates, latencies and the load of workers over a window of time that ends at a moment, in equal columns."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.ops.history.columns import Lines
from headwater.ops.history.history import SECOND_NS, Samples
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

    def columns_of(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The columns of times after the window's start."""
        after = times_ns - self.from_ns - 1
        return np.clip((after / self.step_ns).astype(np.int64), 0, self.columns - 1)


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
    fresh = (at >= 0) & (ends - reported <= REPORT_NS_MAX + window.step_ns)
    if left_ns:
        fresh &= ~((reported <= left_ns) & (left_ns < ends))

    def column(values: Any) -> F64:
        return np.where(fresh, np.array(values, np.float64)[np.maximum(at, 0)], np.nan)

    return Lane(column(samples.running), column(samples.waiting), np.round(column(samples.used), 4))


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that this share of the values does not exceed (nearest rank); None of none."""
    return _nearest(np.array(values, np.float64), share)


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
    counted = [
        (row.found_tokens, row.prompt_tokens) for row in rows if row.found_tokens >= 0 and row.prompt_tokens
    ]
    total = sum(prompt for _, prompt in counted)
    return sum(cached for cached, _ in counted) / total if total else None


def rates(table: RequestTable, from_ns: int, to_ns: int) -> Rates:
    """The rates of the requests of a span of time."""
    seconds = max(1e-9, (to_ns - from_ns) / 1e9)
    accepted, started, ended = selection(table, from_ns, to_ns)
    ttft, gaps = _known(ended["ttft_ms"]), _known(ended["gap_ms"])
    return Rates(
        len(accepted) / seconds,
        int(ended["completion_tokens"].sum()) / seconds,
        int(ended["failed"].sum()) / seconds,
        int(ended["migrations"].sum()) / seconds,
        _nearest(ttft, 0.5),
        _nearest(ttft, 0.99),
        _nearest(gaps, 0.5),
        _share(started[started["accepted_ns"] > from_ns], "found_tokens"),
    )


def hits_by_worker(table: RequestTable, from_ns: int, to_ns: int) -> dict[str, float]:
    """The cache hit rate of each worker, of the requests of a span of time that it started."""
    started = table.started.between(from_ns, to_ns)
    started = started[(started["accepted_ns"] > from_ns) & (started["found_tokens"] >= 0)]
    count = len(table.names)
    cached, total = (
        np.bincount(started["worker"], started[name], count) for name in ("found_tokens", "prompt_tokens")
    )
    return {table.names[at]: float(cached[at] / total[at]) for at in np.flatnonzero(total)}


class Selection(NamedTuple):
    """The requests that were accepted, that started, and that ended in a window, as lines of the table's columns."""

    accepted: Lines
    started: Lines
    ended: Lines

    def only(self, field: str, value: int) -> "Selection":
        """Those of a model or tenant."""
        return Selection(*(lines[lines[field] == value] for lines in self))


def selection(table: RequestTable, from_ns: int, to_ns: int) -> Selection:
    """The requests of a span of time."""
    return Selection(
        *(columns.between(from_ns, to_ns) for columns in (table.accepted, table.started, table.ended))
    )


def request_series(rows: Selection, window: Window) -> dict[str, list[float | None]]:
    """The series of `UNITS` that requests give."""
    seconds = window.step_ns / 1e9
    accepted, started, ended = (_by_column(lines, window) for lines in rows)

    def each(columns: Sequence[Lines], value: Callable[[Lines], float | None]) -> list[float | None]:
        return [value(column) if len(column) else None for column in columns]

    def rate(columns: Sequence[Lines], field: str) -> list[float | None]:
        return [int(column[field].sum()) / seconds for column in columns]

    def times(columns: Sequence[Lines], field: str, *shares: float) -> list[list[float | None]]:
        """Quantiles; times of 0 are unknown."""
        ordered = [np.sort(_known(column[field])) for column in columns]
        return [[_ranked(values, share) for values in ordered] for share in shares]

    ttft_p50, ttft_p90, ttft_p99 = times(started, "ttft_ms", 0.5, 0.9, 0.99)
    duration_p50, duration_p99 = times(ended, "duration_ms", 0.5, 0.99)
    return {
        "requests_per_s": [len(column) / seconds for column in accepted],
        "tokens_per_s": rate(ended, "completion_tokens"),
        "errors_per_s": rate(ended, "failed"),
        "migrations_per_s": rate(ended, "migrations"),
        "ttft_p50_ms": ttft_p50,
        "ttft_p90_ms": ttft_p90,
        "ttft_p99_ms": ttft_p99,
        "duration_p50_ms": duration_p50,
        "duration_p99_ms": duration_p99,
        "queue_p99_ms": each(started, lambda column: _nearest(column["waited_ms"], 0.99)),
        "hit_rate": each(started, lambda column: _share(column, "found_tokens")),
        "predicted_hit_rate": each(started, lambda column: _share(column, "expected_tokens")),
        "regret_ms": each(
            started, lambda column: _nearest(column["regret_ms"][~np.isnan(column["regret_ms"])], 0.5)
        ),
    }


def load_series(lanes: Sequence[Lane], window: Window) -> dict[str, list[float]]:
    """The series of `UNITS` that load reports give: sums over workers, and the mean share of KV in use; NaN where no report tells."""
    if not lanes:
        nothing = [float("nan")] * window.columns
        return {"running": nothing, "waiting": nothing, "kv_used": nothing}
    running, waiting, used = (np.array([lane[number] for lane in lanes]) for number in range(3))
    sampled = ~np.isnan(running)
    count = sampled.sum(axis=0)

    def total(values: F64) -> F64:
        return np.where(count > 0, np.where(sampled, values, 0.0).sum(axis=0), np.nan)

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


def usage(rows: Selection, opened: int) -> Usage:
    """The usage by the requests of a span of time, of which `opened` are open at its end."""
    ended = rows.ended
    return Usage(
        len(rows.accepted),
        len(ended),
        int(ended["failed"].sum()),
        int(ended["prompt_tokens"].sum()),
        int(ended["cached_tokens"].sum()),
        int(ended["completion_tokens"].sum()),
        opened,
    )


def usage_by(rows: Selection, field: str, opened: Sequence[int]) -> dict[int, Usage]:
    """The usage by each value of a field. `opened` are the values of the requests that are open at the end."""
    ended, still = rows.ended, np.array(opened, np.int64)
    values = np.unique(np.concatenate([rows.accepted[field], ended[field], still]))

    def sums(of: NDArray[Any], weights: NDArray[Any] | None = None) -> list[int]:
        return np.bincount(np.searchsorted(values, of), weights, len(values)).astype(np.int64).tolist()  # type: ignore[no-any-return]  # of integers

    tokens = ("failed", "prompt_tokens", "cached_tokens", "completion_tokens")
    parts = (
        sums(rows.accepted[field]),
        sums(ended[field]),
        *(sums(ended[field], ended[name]) for name in tokens),
        sums(still),
    )
    return {value: Usage(*totals) for value, *totals in zip(values.tolist(), *parts, strict=True)}


def _by_column(lines: Lines, window: Window) -> list[Lines]:
    """The lines of each column. They are in the order of their time, the first field."""
    columns = window.columns_of(lines[lines.dtype.names[0]])  # type: ignore[index]  # it has fields
    edges = np.searchsorted(columns, np.arange(window.columns + 1)).tolist()
    return [lines[start:end] for start, end in pairwise(edges)]


def _known(values: F64) -> F64:
    """Without zeros and NaN."""
    nonzero: F64 = values[(values != 0.0) & ~np.isnan(values)]
    return nonzero


def _ranked(ordered: F64, share: float) -> float | None:
    """`quantile` of ordered values."""
    if not len(ordered):
        return None
    return float(ordered[min(len(ordered) - 1, max(0, int(np.ceil(share * len(ordered))) - 1))])


def _nearest(values: F64, share: float) -> float | None:
    return _ranked(np.sort(values), share)


def _share(started: Lines, field: str) -> float | None:
    """The share of prompt tokens that were found, or expected, of the requests of which that is known."""
    reported = started[(started[field] >= 0) & (started["prompt_tokens"] > 0)]
    total = int(reported["prompt_tokens"].sum())
    return int(reported[field].sum()) / total if total else None
