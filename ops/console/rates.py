"""The views of load: rates, latencies and usage over the window before a position, and the requests that wait for a worker.

Rates and usage are of all requests, or of some, by tenant or by model. Of those that wait it is shown of which tenant and priority, for how
long and why, and how long requests waited lately.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from headwater.actors.http.errors import forbidden
from headwater.ops.console.query import Query
from headwater.ops.console.views import (
    NO_TENANT,
    Document,
    asked_window,
    axis_of,
    head,
    lanes_between,
    marks_shown,
    notice_of,
    tenant_text,
)
from headwater.ops.history import series
from headwater.ops.history.findings import BEFORE_NS
from headwater.ops.history.history import FleetAt, History, Moment
from headwater.ops.history.requests import Request, RequestTable
from headwater.router.worker import Worker

# Requests that wait.

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
        "groups": _queue_groups(
            {row.id: group_of(row) for row in (*waiting, *recent)}, waiting, recent, moment
        ),
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


def _queue_groups(
    group_of: dict[str, Group], waiting: Sequence[Request], recent: Sequence[Request], moment: Moment
) -> list[Document]:
    """The groups by priority and tenant: what waits of each, the oldest of it, and the waits of those that were routed lately."""
    now: defaultdict[Group, list[Request]] = defaultdict(list)
    lately: defaultdict[Group, list[Request]] = defaultdict(list)
    for rows, by_group in ((waiting, now), (recent, lately)):
        for row in rows:
            by_group[group_of[row.id]].append(row)
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
        worker = row.worker_at(lost[-1])
        again = (
            f"it goes on elsewhere after {worker} failed" if worker else "it is tried again after a failure"
        )
        return f"{again}; {reason}" if reason else again
    if reason:
        return reason
    if now_ns - row.since_ns(now_ns) < ON_ITS_WAY_NS:
        return "it was just accepted"
    return "no worker meets its constraints, or its router does not answer: workers have room"


def _why_all(fleet: FleetAt) -> str:
    """Why any request waits; "" if there is room."""
    ready = [worker for worker in fleet.loads.workers.values() if worker.takes_requests]
    if not ready:
        return "no worker takes requests"
    if all(worker.running + worker.waiting >= worker.max_running for worker in ready):
        return "every worker has as many requests as it may run"
    if all(_is_full(worker) for worker in ready):
        return "every worker has requests waiting, or no free KV blocks"
    return ""


def _is_full(worker: Worker) -> bool:
    return worker.waiting > 0 or max(worker.used_blocks, worker.decode_blocks) >= FULL * worker.total_blocks


# Rates and usage.

GROUPS_MAX: Final = 6
"""Groups of a split that have series of their own: those with most requests."""

LISTED_MAX: Final = 1_000
"""Tenants, and models, that are listed: those with most requests or tokens."""

Split = Literal["", "tenant", "model"]
Field = Literal["tenant", "model"]


def refuse_tenants(query: Query) -> None:
    """What tells tenants apart is refused to who may not see them: also without names their number and traffic would show. Raises `ApiError` 403."""
    if query.text("tenant") or query.text("split") == "tenant":
        raise forbidden("Tenants are shown to who has the scope 'admin' or a token of --console-token-file.")


async def series_view(history: History, query: Query, *, tenants: bool) -> Document:
    """Rates and latencies: of all requests with the load of workers, of some, and split into groups. With `tenants`, those too are listed."""
    moment, window = await asked_window(history, query)
    split: Split = query.choice("split", Split, "")
    table = history.requests
    rows = series.selection(table, window.from_ns, window.to_ns)
    chosen = _chosen(table, rows, query)
    marks = history.fleet.marks_between(window.from_ns, window.to_ns)
    by_name: dict[str, Any] = {**series.request_series(chosen, window)}
    if chosen is rows:
        # What engines run is not told by tenant or model.
        by_name |= series.load_series(list(lanes_between(history, window, marks).values()), window)
    counts = _counts(table, chosen, window, split) if split else []
    models = _counts(table, rows, window, "model")[:LISTED_MAX]
    named = _counts(table, rows, window, "tenant")[:LISTED_MAX] if tenants else []
    return {
        **head(moment, notice_of(history)),
        **axis_of(window),
        "series": by_name,
        "units": series.UNITS,
        "split": split,
        "groups": _groups(chosen, window, split, counts[:GROUPS_MAX]) if split else [],
        "groups_total": len(counts),
        "models": [{"name": count.name, "requests": count.requests} for count in models],
        "tenants": [{"tenant": count.name, "requests": count.requests} for count in named],
        "marks": marks_shown(marks),
    }


class Count(NamedTuple):
    """A tenant or model, its number in columns, and how many requests it has."""

    name: str
    value: int
    requests: int


def _name(table: RequestTable, field: Field, value: int) -> str:
    """A model, or the digest of a tenant as the page names it."""
    return table.names[value] if field == "model" else tenant_text(value)


def _chosen(table: RequestTable, rows: series.Selection, query: Query) -> series.Selection:
    """The requests that a query selects."""
    tenant, model = query.text("tenant"), query.text("model")
    if model:
        rows = rows.only("model", table.number_of(model))
    if tenant:
        rows = rows.only("tenant", _digest(tenant))
    return rows


def _digest(tenant: str) -> int:
    """The number of `tenant_text`; -1 for what is none."""
    if tenant == NO_TENANT:
        return 0
    return int(tenant, 16) if re.fullmatch("[0-7][0-9a-f]{15}", tenant) else -1


def _counts(table: RequestTable, rows: series.Selection, window: series.Window, field: Field) -> list[Count]:
    """How many requests were accepted, started or ended in the window, by tenant or model, the most first."""
    fields = ["number", field]
    earlier = np.concatenate(
        [lines[lines["accepted_ns"] <= window.from_ns][fields] for lines in (rows.started, rows.ended)]
    )
    values = np.concatenate([rows.accepted[field], np.unique(earlier)[field]])
    totals = zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True)
    counts = [Count(_name(table, field, value), value, requests) for value, requests in totals]
    return sorted(counts, key=lambda count: (-count.requests, count.name))


def _groups(
    rows: series.Selection, window: series.Window, field: Field, counts: Sequence[Count]
) -> list[Document]:
    """The series of groups by name: their colours stay while the numbers change."""
    return [
        {
            field: count.name,
            "requests": count.requests,
            "series": series.request_series(rows.only(field, count.value), window),
        }
        for count in sorted(counts)
    ]


async def usage_view(history: History, query: Query, *, tenants: bool) -> Document:
    """Requests and tokens of the window by model, and with `tenants` by tenant, those with most tokens first."""
    moment, window = await asked_window(history, query)
    table = history.requests
    rows = series.selection(table, window.from_ns, window.to_ns)
    opened = table.open_at(moment.stored_ns)
    notice = notice_of(history)
    if table.dropped_ns > window.from_ns:
        notice = "The console keeps the newest requests only; older ones of this window do not count."
    models = [table.number_of(row.model) for row in opened]
    by_model = _usage(table, rows, "model", models)
    by_tenant = _usage(table, rows, "tenant", [row.tenant for row in opened]) if tenants else {}
    return {
        **head(moment, notice),
        "window_s": (window.to_ns - window.from_ns) / 1e9,
        "total": series.usage(rows, len(opened))._asdict(),
        "by_model": [{"model": name, **usage._asdict()} for name, usage in by_model.items()],
        "by_tenant": [{"tenant": name, **usage._asdict()} for name, usage in by_tenant.items()],
    }


def _usage(
    table: RequestTable, rows: series.Selection, field: Field, opened: Sequence[int]
) -> dict[str, series.Usage]:
    """The usage of each group, of the `LISTED_MAX` with most tokens. `opened` are the groups of the open requests."""
    by_name = {
        _name(table, field, value): entry for value, entry in series.usage_by(rows, field, opened).items()
    }
    most = sorted(
        by_name.items(), key=lambda entry: (-entry[1].prompt_tokens - entry[1].completion_tokens, entry[0])
    )
    return dict(most[:LISTED_MAX])
