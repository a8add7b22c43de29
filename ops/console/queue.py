"""The view of requests that wait for a worker: of which tenant and priority, for how long and why, and how long requests waited lately."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from headwater.ops.console.query import Query
from headwater.ops.console.views import Document, head, notice_of, tenant_text
from headwater.ops.history import series
from headwater.ops.history.findings import BEFORE_NS
from headwater.ops.history.fleet import FleetAt
from headwater.ops.history.history import History, Moment
from headwater.ops.history.requests import Request
from headwater.router.fold.worker import Worker

FULL: Final = 0.95
"""The share of KV blocks in use from which on a worker counts as full here."""

ON_ITS_WAY_NS: Final = 1_000_000_000
"""A request that was accepted so recently may not have reached a router."""

NOT_RECORDED: Final = (
    "The log has tenant and priority of what waits. It does not have its deadline, nor its constraints before it is routed, nor "
    "whether a router has queued it."
)

Group = tuple[int, str]
"""Priority and tenant."""


async def queue_view(history: History, query: Query, *, tenants: bool) -> Document:
    """Requests that wait for a worker, in groups of a priority and, with `tenants`, a tenant, the first to be served first."""
    moment = await history.moment(query.optional("at"))
    now_ns = moment.stored_ns
    fleet = await history.fleet_at(moment)
    waiting = [row for row in history.requests.open_at(now_ns) if row.state_at(now_ns) == "routing"]
    waiting.sort(key=lambda row: (row.priority, row.since_ns(now_ns), row.log_position, row.id))
    reason = _why_all(fleet)
    recent = _decided(history, moment)

    def group_of(row: Request) -> Group:
        return row.priority, tenant_text(row.tenant) if tenants else ""

    return {
        **head(moment, notice_of(history)),
        "waiting": [_waiting(row, waiting, now_ns, reason) for row in waiting],
        "groups": _groups({row.id: group_of(row) for row in (*waiting, *recent)}, waiting, recent, moment),
        "by": "tenant and priority" if tenants else "priority",
        "waited": _waited(recent, moment.position),
        "waited_s": BEFORE_NS // 1_000_000_000,
        "not_recorded": NOT_RECORDED,
    }


def _waiting(row: Request, waiting: Sequence[Request], now_ns: int, reason: str) -> Document:
    return {
        "request": row.id,
        "tenant": tenant_text(row.tenant),
        "priority": row.priority,
        "waited_ms": (now_ns - row.since_ns(now_ns)) / 1e6,
        "before": sum(other.priority < row.priority for other in waiting),
        "prompt_tokens": row.prompt_tokens,
        "model": row.model,
        "reason": _why(row, now_ns, reason),
    }


def _decided(history: History, moment: Moment) -> list[Request]:
    """The requests of the last `BEFORE_NS` with a decision by the position."""
    recent = history.requests.accepted_between(moment.stored_ns - BEFORE_NS, moment.stored_ns)
    return [row for row in recent if row.decisions and row.decisions[0] <= moment.position]


def _waited(rows: Sequence[Request], position: int) -> Document:
    waits = [float(row.waited_at(position)) for row in rows]
    return {"p50_ms": series.quantile(waits, 0.5), "p99_ms": series.quantile(waits, 0.99)}


def _groups(
    group_of: dict[str, Group], waiting: Sequence[Request], recent: Sequence[Request], moment: Moment
) -> list[Document]:
    """The groups by priority and tenant: what waits of each, the oldest of it, and the waits of those that were routed lately."""
    now: defaultdict[Group, list[Request]] = defaultdict(list)
    lately: defaultdict[Group, list[Request]] = defaultdict(list)
    for rows, found in ((waiting, now), (recent, lately)):
        for row in rows:
            found[group_of[row.id]].append(row)
    return [
        {
            "priority": group[0],
            "tenant": group[1],
            "count": len(now[group]),
            "oldest_ms": max(
                ((moment.stored_ns - row.since_ns(moment.stored_ns)) / 1e6 for row in now[group]),
                default=None,
            ),
            "routed": len(lately[group]),
            **_waited(lately[group], moment.position),
        }
        for group in sorted(now.keys() | lately.keys())
    ]


def _why(row: Request, now_ns: int, reason: str) -> str:
    """Why a request waits, as far as the log tells."""
    lost = [time_ns for time_ns in row.failures if time_ns <= now_ns]
    if lost:
        names = [name for time_ns, name in row.workers if time_ns <= lost[-1]]
        again = (
            f"it goes on elsewhere after {names[-1]} failed" if names else "it is tried again after a failure"
        )
        return f"{again}; {reason}" if reason else again
    if reason:
        return reason
    if now_ns - row.since_ns(now_ns) < ON_ITS_WAY_NS:
        return "it was just accepted"
    return "no worker meets its constraints, or its router does not answer: workers have room"


def _why_all(fleet: FleetAt) -> str:
    """Why any request waits; "" if there is room."""
    ready = [one for one in fleet.loads.workers.values() if one.takes_requests]
    if not ready:
        return "no worker takes requests"
    if all(one.running + one.waiting >= one.max_running for one in ready):
        return "every worker has as many requests as it may run"
    if all(_is_full(one) for one in ready):
        return "every worker has requests waiting, or no free KV blocks"
    return ""


def _is_full(one: Worker) -> bool:
    return one.waiting > 0 or max(one.used_blocks, one.decode_blocks) >= FULL * one.total_blocks
