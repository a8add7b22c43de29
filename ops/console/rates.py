"""The views of rates, latencies and usage over the window before a position: of all requests, or of some, by tenant or by model."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

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
from headwater.ops.history.requests import Request

GROUPS_MAX: Final = 6
"""Groups of a split that have series of their own: those with most requests."""

LISTED_MAX: Final = 1_000
"""Tenants, and models, that are listed: those with most requests or tokens."""

Split = Literal["", "tenant", "model"]
Key = Callable[[Request], str]


def tenant_of(row: Request) -> str:
    """The digest of a request's tenant as the page names it."""
    return tenant_text(row.tenant)


def model_of(row: Request) -> str:
    """The model that a request named."""
    return row.model


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
    rows = series.selection(history.requests, window.from_ns, window.to_ns)
    chosen = rows.only(_filter(query)) if query.text("tenant") or query.text("model") else rows
    named = _distinct(rows)
    marks = history.fleet.marks_between(window.from_ns, window.to_ns)
    found: dict[str, Any] = {**series.request_series(chosen, window)}
    if not (query.text("tenant") or query.text("model")):
        # What engines run is not told by tenant or model.
        found |= series.load_series(list(lanes_between(history, window, marks).values()), window)
    key = tenant_of if split == "tenant" else model_of
    return {
        **head(moment, notice_of(history)),
        **axis_of(window),
        "series": found,
        "units": series.UNITS,
        "split": split,
        "groups": [{split: name, **group} for name, group in _groups(chosen, window, key)] if split else [],
        "groups_total": len(_counts(_distinct(chosen), key)) if split else 0,
        "models": [
            {"name": name, "requests": count} for name, count in _counts(named, model_of)[:LISTED_MAX]
        ],
        "tenants": [
            {"tenant": name, "requests": count} for name, count in _counts(named, tenant_of)[:LISTED_MAX]
        ]
        if tenants
        else [],
        "marks": marks_shown(marks),
    }


def _filter(query: Query) -> Callable[[Request], bool]:
    """Which requests a query selects."""
    tenant, model = query.text("tenant"), query.text("model")
    return lambda row: (
        (not model or row.model == model) and (not tenant or (tenant_of(row) or NO_TENANT) == tenant)
    )


def _groups(rows: series.Selection, window: series.Window, key: Key) -> list[tuple[str, Document]]:
    """The series of the groups of a split with most requests, by name: their colours stay while the numbers change."""
    found = []
    for name, count in sorted(_counts(_distinct(rows), key)[:GROUPS_MAX]):
        own = rows.only(lambda row, name=name: key(row) == name)  # type: ignore[misc]
        found.append((name, {"requests": count, "series": series.request_series(own, window)}))
    return found


def _distinct(rows: series.Selection) -> list[Request]:
    """Each request once that was accepted, started or ended in a window."""
    return list({id(row): row for part in rows for row in part}.values())


def _counts(rows: Sequence[Request], key: Key) -> list[tuple[str, int]]:
    """How many of some requests each group has, the most first."""
    counts = Counter(map(key, rows))
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))


async def usage_view(history: History, query: Query, *, tenants: bool) -> Document:
    """Requests and tokens of the window by model, and with `tenants` by tenant, those with most tokens first."""
    moment, window = await asked_window(history, query)
    rows = series.selection(history.requests, window.from_ns, window.to_ns)
    opened = history.requests.open_at(moment.stored_ns)
    notice = notice_of(history)
    if history.requests.dropped_ns > window.from_ns:
        notice = "The console keeps the newest requests only; older ones of this window do not count."
    by_tenant = _usage(rows, opened, tenant_of) if tenants else {}
    by_model = _usage(rows, opened, model_of)
    return {
        **head(moment, notice),
        "window_s": (window.to_ns - window.from_ns) / 1e9,
        "total": series.usage(rows, opened)._asdict(),
        "by_model": [{"model": name, **one._asdict()} for name, one in by_model.items()],
        "by_tenant": [{"tenant": name, **one._asdict()} for name, one in by_tenant.items()],
    }


def _usage(rows: series.Selection, opened: Sequence[Request], key: Key) -> dict[str, series.Usage]:
    """The usage of each group, of the `LISTED_MAX` with most tokens."""
    parts: defaultdict[str, tuple[list[Request], ...]] = defaultdict(lambda: ([], [], [], []))
    for place, part in enumerate((*rows, opened)):
        for row in part:
            parts[key(row)][place].append(row)
    found = {name: series.usage(series.Selection(*own[:3]), own[3]) for name, own in parts.items()}
    most = sorted(found.items(), key=lambda one: (-one[1].prompt_tokens - one[1].completion_tokens, one[0]))
    return dict(most[:LISTED_MAX])
