"""What is wrong with a fleet at a moment, worst first: each finding names the worker or request, since when, and the remedy.

Of a cache hit rate that fell it says since when, by how much more than it varies, on which worker, and whether the router expected it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.ops.history.history import FleetAt, Mark
from headwater.ops.history.requests import Request, RequestTable
from headwater.ops.history.series import hit_rate, quantile
from headwater.router.worker import Worker

LEAST_REQUESTS: Final = 20
"""Fewer requests say nothing of a rate."""

HITS_LOST: Final = 0.15
"""The share of prompt tokens that must be lost."""

STANDARD_ERRORS: Final = 4.0
"""By how many standard errors the rate must have fallen: where it began to fall is chosen among all requests, so two are not enough."""

OF_ONE_WORKER: Final = 0.6
OVER_ITS_PART: Final = 1.25
"""The part of the loss that points to one worker, also compared with its part of the requests: who gets most has most of any loss."""

UNEXPECTED: Final = 0.1
"""The router expected more hits than engines found, by this share of the prompt tokens."""


class Fallen(NamedTuple):
    """Hit rates before and after `first`, the request with which it fell, and what the router `expected` since (None: unknown).

    `worker` has most of the loss, "" if several have.
    """

    before: float
    now: float
    expected: float | None
    first: Request
    worker: str


def fallen_hits(recent: Sequence[Request], before: Sequence[Request]) -> Fallen | None:
    """Compares the latest requests, in order, with those before them. None if the rate did not fall, or no more than it varies.

    Rates are shares of all tokens. Whether one fell is judged by the mean of the requests' own shares: a few very long prompts move
    the former, and say nothing.
    """
    recent, before = _known(recent), _known(before)
    rate = hit_rate(before)
    if rate is None or min(len(recent), len(before)) < LEAST_REQUESTS:
        return None
    shares = _shares(before)
    usual = float(shares.mean())
    since = _since(recent, usual)
    now, shares_now = hit_rate(since), _shares(since)
    if now is None or rate - now < HITS_LOST:
        return None
    # Of a few requests, all of which happen to miss, the variance would say that they cannot hit.
    variance = max(shares.var(), shares_now.var())
    error = sqrt(variance / len(shares) + variance / len(shares_now))
    if usual - shares_now.mean() < max(HITS_LOST, STANDARD_ERRORS * error):
        return None
    return Fallen(rate, now, _expected(since), since[0], _worker(since, usual))


def _known(rows: Sequence[Request]) -> list[Request]:
    return [row for row in rows if row.found_tokens >= 0 and row.prompt_tokens]


def _share(row: Request) -> float:
    return row.found_tokens / row.prompt_tokens


def _shares(rows: Sequence[Request]) -> NDArray[np.float64]:
    return np.array([_share(row) for row in rows])


def _since(rows: list[Request], usual: float) -> list[Request]:
    """The latest requests, so many that they lost the most by the usual share, and enough to say something."""
    lost, most, start = 0.0, 0.0, len(rows) - LEAST_REQUESTS
    for at in range(len(rows) - 1, -1, -1):
        # Small losses are none: with them a fall would seem to begin long before.
        lost += usual - HITS_LOST / 2 - _share(rows[at])
        if at <= len(rows) - LEAST_REQUESTS and lost > most:
            most, start = lost, at
    return rows[start:]


def _expected(rows: list[Request]) -> float | None:
    expecting = [row for row in rows if row.expected_tokens >= 0]
    total = sum(row.prompt_tokens for row in expecting)
    return sum(row.expected_tokens for row in expecting) / total if total else None


def _worker(rows: list[Request], usual: float) -> str:
    """The worker that has most of the loss, and more of it than of the requests."""
    lost: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for row in rows:
        if name := row.worker_at(row.started_ns):
            lost[name] += usual - _share(row)
            counts[name] += 1
    if len(lost) < 2:
        return ""
    worst = max(lost, key=lambda name: lost[name])
    share = lost[worst] / sum(max(0.0, loss) for loss in lost.values())
    return worst if share > max(OF_ONE_WORKER, OVER_ITS_PART * counts[worst] / len(rows)) else ""


Severity = Literal["critical", "warning", "info"]

RECENT_NS: Final = 120_000_000_000
BEFORE_NS: Final = 900_000_000_000
"""What is compared: the latest two minutes with the fifteen before them."""

STUCK_NS: Final = 10_000_000_000
"""An open request without any event for so long makes no progress."""

LONG_NS: Final = 60_000_000_000
"""While it generates, a request has an event every 64 tokens; slower ones are not stuck."""

JOINED_NS: Final = 30_000_000_000
"""A worker that joined so shortly before or after the hit rate fell is taken for its cause."""

COMPARED_MAX: Final = 5_000
"""Requests of a span of time that are compared: at 500 a second more would take longer than a page waits, and say no more."""

FEW: Final = 8

SLOW: Final = 1.5
ERRORS: Final = 0.02
TTFT_GROWN: Final = 2.0
KV_FULL: Final = 0.95

_ORDER: Final[dict[Severity, int]] = {"critical": 0, "warning": 1, "info": 2}


class Finding(NamedTuple):
    """One thing that is wrong, and what to do about it. `position` is where it began, None if that is not known."""

    severity: Severity
    title: str
    text: str
    remedy: str
    worker: str = ""
    request: str = ""
    position: int | None = None


def findings(fleet: FleetAt, table: RequestTable, marks: Sequence[Mark]) -> list[Finding]:
    """All findings at the moment of `fleet`. `marks` are the changes of the fleet of the last `BEFORE_NS`."""
    now_ns = fleet.stored_ns
    workers = list(fleet.loads.workers.values())
    all_findings = [
        *_missing(workers, marks, now_ns),
        *_slow_workers(workers),
        *_full_workers(workers),
        *_requests(table, marks, now_ns),
        *_stuck(table, fleet, now_ns),
        *_not_ready(workers),
    ]
    return sorted(all_findings, key=lambda finding: _ORDER[finding.severity])


def _missing(workers: Sequence[Worker], marks: Sequence[Mark], now_ns: int) -> list[Finding]:
    """Workers that left and did not come back, and a fleet without any."""
    present = {worker.name for worker in workers}
    by_worker: dict[str, Finding] = {}
    severity: Severity
    for mark in [one for one in marks if one.kind == "left"]:
        is_clean = any(word in mark.text for word in ("stopped", "drained"))
        title = "is gone"
        if mark.worker not in present and is_clean:
            severity, remedy = "info", "nothing, if it was stopped on purpose"
        elif mark.worker not in present:
            severity = "critical"
            remedy = "read the end of its log; `headwater up` or its supervisor should have started it again"
        elif not is_clean and mark.time_ns > now_ns - RECENT_NS:
            severity, title = "warning", "was lost and came back"
            remedy = "read its log for the cause; its running requests were continued on other workers"
        else:
            continue
        name, text = mark.worker, f"{mark.worker} {mark.text}"
        by_worker[name] = Finding(severity, f"{name} {title}", text, remedy, name, position=mark.position)
    if not any(worker.takes_requests for worker in workers):
        described = f"{len(workers)} workers, none of which takes requests" if workers else "no workers"
        none = Finding(
            "critical",
            "No worker takes requests",
            f"The pool has {described}.",
            "start a worker, or wake one",
        )
        return [none, *by_worker.values()]
    return list(by_worker.values())


class _Usual(NamedTuple):
    """Medians of some workers: milliseconds between two tokens (0: none known), and the pace of prefills."""

    step_ms: float
    pace: float


def _usual(workers: Sequence[Worker]) -> _Usual:
    steps = [worker.step_ms for worker in workers if worker.step_ms]
    paces = [worker.pace for worker in workers]
    return _Usual(median(steps) if steps else 0.0, median(paces) if paces else 1.0)


def _slow_workers(workers: Sequence[Worker]) -> list[Finding]:
    """Workers whose steps or prefills take much longer than those of their kind."""
    groups: defaultdict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        groups[worker.step_kind].append(worker)
    problems = []
    for group in groups.values():
        usuals: dict[str, _Usual] = {}
        for worker in group:
            # In a large group one worker does not move the median.
            others = [other for other in group if other is not worker] if len(group) <= FEW else group
            key = worker.name if len(group) <= FEW else ""
            usual = usuals.get(key) or usuals.setdefault(key, _usual(others))
            if usual.step_ms and worker.step_ms > SLOW * usual.step_ms:
                text = f"{worker.step_ms:.1f} ms between two tokens; the others of its kind take {usual.step_ms:.1f} ms"
            elif others and worker.pace > SLOW * usual.pace:
                text = f"its prefills take {worker.pace / usual.pace:.1f} times as long as those of the others of its kind"
            else:
                continue
            problems.append(
                Finding(
                    "warning",
                    f"{worker.name} is slow",
                    text,
                    "check its machine (clock, temperature, other processes); drain it if that does not help",
                    worker=worker.name,
                )
            )
    return problems


def _full_workers(workers: Sequence[Worker]) -> list[Finding]:
    """Workers with requests that wait while their KV cache is full."""
    return [
        Finding(
            "warning",
            f"{worker.name} has no room",
            f"{worker.used_blocks} of {worker.total_blocks} KV blocks are in use and {worker.waiting} requests wait in its engine",
            "add workers, or limit the context or the number of concurrent requests",
            worker=worker.name,
        )
        for worker in workers
        if worker.waiting and worker.used_blocks >= KV_FULL * worker.total_blocks
    ]


def _requests(table: RequestTable, marks: Sequence[Mark], now_ns: int) -> list[Finding]:
    """Errors, lost cache hits and grown latencies of the latest requests."""
    from_ns = now_ns - RECENT_NS
    ended = table.ended.between(from_ns, now_ns)
    recent = _started(table, from_ns, now_ns)
    before = _started(table, now_ns - BEFORE_NS, from_ns)
    problems = []
    failed = int(ended["failed"].sum())
    if failed >= max(1, ERRORS * len(ended)):
        newest = table.last_failed(now_ns)
        problems.append(
            Finding(
                "critical" if failed > len(ended) / 4 else "warning",
                "Requests fail",
                f"{failed} of {len(ended)} requests of the last two minutes; the latest: {newest.error or 'no reason given'}",
                f"open {newest.id}, or filter requests by failed",
                request=newest.id,
                position=newest.decisions[-1] if newest.decisions else None,
            )
        )
    problems += _fallen(recent, before, marks)
    if len(recent) >= LEAST_REQUESTS and len(before) >= LEAST_REQUESTS:
        problems += _compared(recent, before)
    return problems


def _started(table: RequestTable, from_ns: int, to_ns: int) -> list[Request]:
    """The requests that were accepted and started in a span of time; of very many, some."""
    rows = table.accepted_between(from_ns, to_ns, COMPARED_MAX)
    return [row for row in rows if 0 < row.started_ns <= to_ns]


def _compared(recent: Sequence[Request], before: Sequence[Request]) -> list[Finding]:
    now_ms = quantile([row.ttft_ms for row in recent], 0.5) or 0.0
    then_ms = quantile([row.ttft_ms for row in before], 0.5) or 0.0
    if not (now_ms > TTFT_GROWN * then_ms and now_ms > then_ms + 50):
        return []
    return [
        Finding(
            "warning",
            "The first token takes longer",
            f"{now_ms:.0f} ms in the median of the last two minutes, {then_ms:.0f} ms in the fifteen before",
            "compare queue, prefill and hit rate over time; add workers if all are busy",
            position=recent[0].decisions[0] if recent[0].decisions else None,
        )
    ]


def _fallen(recent: Sequence[Request], before: Sequence[Request], marks: Sequence[Mark]) -> list[Finding]:
    """A cache hit rate that fell, and what it points to: a worker with an empty cache, lost blocks, or other prompts."""
    fallen = fallen_hits(recent, before)
    if fallen is None:
        return []
    first = fallen.first
    position = first.decisions[0] if first.decisions else None
    restarts = [
        mark
        for mark in marks
        if mark.kind == "joined" and (not fallen.worker or mark.worker == fallen.worker)
    ]
    began_ns = first.accepted_ns - JOINED_NS
    restart = next(
        (mark for mark in restarts if began_ns < mark.time_ns < first.accepted_ns + JOINED_NS), None
    )
    unexpected = fallen.expected is not None and fallen.expected - fallen.now > UNEXPECTED
    worker, where = fallen.worker, f", most of it on {fallen.worker}" if fallen.worker else ""
    if restart is not None:
        worker, position = restart.worker, restart.position
        cause = f"{restart.worker} joined with an empty cache"
        remedy = "it recovers as the cache fills; if the worker was not restarted on purpose, read its log"
    elif unexpected:
        cause = f"the router expected {fallen.expected:.0%}: engines lost blocks that it counted on"
        remedy = "look at the events kv.removed and kv.gap and at KV in use; a full cache evicts what is asked for again"
    else:
        cause = (
            "the router expected no more: prompts begin otherwise than before, or their blocks were removed"
        )
        remedy = "compare prompts before and since (a changed system prompt or template?); the prefix tree has what is cached, with its use"
    text = f"{fallen.now:.0%} of prompt tokens are cached since request {first.id}, {fallen.before:.0%} before{where}; {cause}"
    return [Finding("warning", "The cache hit rate fell", text, remedy, worker, first.id, position)]


def _stuck(table: RequestTable, fleet: FleetAt, now_ns: int) -> list[Finding]:
    """Open requests without progress, as one finding."""
    stuck = [row for row in table.open_at(now_ns) if is_stuck(row, now_ns)]
    if not stuck:
        return []
    oldest = min(stuck, key=lambda row: row.since_ns(now_ns))
    seconds = (now_ns - oldest.since_ns(now_ns)) / 1e9
    return [
        Finding(
            "warning",
            f"{len(stuck)} requests make no progress" if len(stuck) > 1 else "A request makes no progress",
            f"{oldest.id} has had no event for {seconds:.0f} s and is in {oldest.state_at(now_ns)}",
            "the view of stuck requests names what each waits for",
            request=oldest.id,
            position=fleet.position,
        )
    ]


def is_stuck(row: Request, now_ns: int) -> bool:
    """Has an open request had no event for too long?"""
    if now_ns - row.accepted_ns <= STUCK_NS:
        return False
    quiet_ns = now_ns - row.since_ns(now_ns)
    return quiet_ns > (LONG_NS if row.state_at(now_ns) == "decode" and row.started_ns else STUCK_NS)


def _not_ready(workers: Sequence[Worker]) -> list[Finding]:
    """Workers that an operator has taken out of service."""
    return [
        Finding(
            "info",
            f"{worker.name} is {'draining' if worker.draining else worker.state}",
            f"{worker.name} takes no new requests and has {worker.running} running",
            "resume or wake it if that is not wanted",
            worker=worker.name,
        )
        for worker in workers
        if not worker.takes_requests
    ]
