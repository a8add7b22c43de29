"""The views of rates, latencies and usage over the window before a position: of all requests, or of some, by tenant or by model."""

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from headwater.actors.http.errors import ApiError
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
from headwater.ops.history.history import History
from headwater.ops.history.requests import RequestTable

GROUPS_MAX: Final = 6
"""Groups of a split that have series of their own: those with most requests."""

LISTED_MAX: Final = 1_000
"""Tenants, and models, that are listed: those with most requests or tokens."""

Split = Literal["", "tenant", "model"]
Field = Literal["tenant", "model"]


def refuse_tenants(query: Query) -> None:
    """What tells tenants apart is refused to who may not see them: also without names their number and traffic would show. Raises `ApiError` 403."""
    if query.text("tenant") or query.text("split") == "tenant":
        raise ApiError(
            403,
            "Tenants are shown to who has the scope 'admin' or a token of --console-token-file.",
            kind="permission_error",
            code="insufficient_scope",
        )


async def series_view(history: History, query: Query, *, tenants: bool) -> Document:
    """Rates and latencies: of all requests with the load of workers, of some, and split into groups. With `tenants`, those too are listed."""
    moment, window = await asked_window(history, query)
    split: Split = query.choice("split", Split, "")
    table = history.requests
    rows = series.selection(table, window.from_ns, window.to_ns)
    chosen = _chosen(table, rows, query)
    marks = history.fleet.marks_between(window.from_ns, window.to_ns)
    found: dict[str, Any] = {**series.request_series(chosen, window)}
    if chosen is rows:
        # What engines run is not told by tenant or model.
        found |= series.load_series(list(lanes_between(history, window, marks).values()), window)
    counts = _counts(table, chosen, window, split) if split else []
    models = _counts(table, rows, window, "model")[:LISTED_MAX]
    named = _counts(table, rows, window, "tenant")[:LISTED_MAX] if tenants else []
    return {
        **head(moment, notice_of(history)),
        **axis_of(window),
        "series": found,
        "units": series.UNITS,
        "split": split,
        "groups": _groups(chosen, window, split, counts[:GROUPS_MAX]) if split else [],
        "groups_total": len(counts),
        "models": [{"name": one.name, "requests": one.requests} for one in models],
        "tenants": [{"tenant": one.name, "requests": one.requests} for one in named],
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
    found = zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True)
    counts = [Count(_name(table, field, value), value, requests) for value, requests in found]
    return sorted(counts, key=lambda one: (-one.requests, one.name))


def _groups(
    rows: series.Selection, window: series.Window, field: Field, counts: Sequence[Count]
) -> list[Document]:
    """The series of groups by name: their colours stay while the numbers change."""
    return [
        {
            field: one.name,
            "requests": one.requests,
            "series": series.request_series(rows.only(field, one.value), window),
        }
        for one in sorted(counts)
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
        "by_model": [{"model": name, **one._asdict()} for name, one in by_model.items()],
        "by_tenant": [{"tenant": name, **one._asdict()} for name, one in by_tenant.items()],
    }


def _usage(
    table: RequestTable, rows: series.Selection, field: Field, opened: Sequence[int]
) -> dict[str, series.Usage]:
    """The usage of each group, of the `LISTED_MAX` with most tokens. `opened` are the groups of the open requests."""
    found = {_name(table, field, value): one for value, one in series.usage_by(rows, field, opened).items()}
    most = sorted(found.items(), key=lambda one: (-one[1].prompt_tokens - one[1].completion_tokens, one[0]))
    return dict(most[:LISTED_MAX])
