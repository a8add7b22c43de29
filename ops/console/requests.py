"""The views of requests: the list of a window, and one request with its stages and decisions, each as it was known at a position."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

import msgspec

from headwater.actors.http.errors import ApiError
from headwater.ops.console.query import Query, not_found
from headwater.ops.console.views import NO_TENANT, Document, head, ms, notice_of, tenant_text
from headwater.ops.history import series
from headwater.ops.history.explanation import describe, event_line
from headwater.ops.history.history import History, Moment
from headwater.ops.history.request_spans import Stamped, events_of, waterfall
from headwater.ops.history.requests import (
    SLOW_SHARE,
    Order,
    Request,
    State,
    StoredDecision,
    decisions_in,
    request_of,
)
from headwater.ops.terminal import fields_of
from headwater.schemas.events import RequestAccepted, RequestEnded

FOREVER_NS: Final = (1 << 63) - 1

# Lists of requests.


async def requests_view(history: History, query: Query) -> Document:
    """The requests of the window before the position, as they were then."""
    moment = await history.moment(query.optional("at"))
    now_ns = moment.stored_ns
    seconds = query.number("window_s", 300, 1, 7 * 24 * 3600)
    state: State = query.choice("state", State, "all")
    order: Order = query.choice("sort", Order, "time")
    descending = query.choice("order", Literal["asc", "desc"], "desc") == "desc"
    offset, limit = query.integer("offset", 0, 0, 10_000_000), query.integer("limit", 100, 1, 1_000)
    from_ns = now_ns - int(seconds * 1e9)
    rows = list(history.requests.accepted_between(from_ns, now_ns))
    older = [row for row in history.requests.open_at(now_ns) if row.accepted_ns <= from_ns]
    rows = [row for row in [*older, *rows] if _matches(row, query, now_ns)]
    rows = _of_state(rows, state, now_ns)
    rows.sort(key=lambda row: _sort_key(row, order, moment), reverse=descending)
    facets = {
        "models": Counter(row.model for row in rows),
        "endpoints": Counter(row.endpoint for row in rows),
        "workers": Counter(
            worker for row in rows for worker in {name for time_ns, name in row.workers if time_ns <= now_ns}
        ),
    }
    notice = notice_of(history)
    if history.requests.dropped_ns > from_ns:
        notice = "The console keeps the newest requests only; older ones of this window are not listed."
    return {
        **head(moment, notice),
        "total": len(rows),
        "offset": offset,
        "requests": [_row(row, moment) for row in rows[offset : offset + limit]],
        "facets": facets,
    }


def _matches(row: Request, query: Query, now_ns: int) -> bool:
    names = ("model", "worker", "endpoint", "tenant", "text")
    model, worker, endpoint, tenant, text = (query.text(name) for name in names)
    return (
        (not model or row.model == model)
        and (not endpoint or row.endpoint == endpoint)
        and (not tenant or (tenant_text(row.tenant) or NO_TENANT) == tenant)
        and (not worker or any(name == worker and time_ns <= now_ns for time_ns, name in row.workers))
        and (not text or text.lower() in f"{row.id} {row.model} {_error(row, now_ns)}".lower())
    )


def _error(row: Request, now_ns: int) -> str:
    return "" if row.is_open(now_ns) else row.error


def _of_state(rows: list[Request], state: State, now_ns: int) -> list[Request]:
    match state:
        case "open":
            return [row for row in rows if row.is_open(now_ns)]
        case "ended":
            return [row for row in rows if not row.is_open(now_ns)]
        case "failed":
            return [row for row in rows if not row.is_open(now_ns) and row.reason == "error"]
        case "migrated":
            return [row for row in rows if any(time_ns <= now_ns for time_ns in row.failures)]
        case "slow":
            started = [row for row in rows if 0 < row.started_ns <= now_ns]
            limit = series.quantile([row.ttft_ms for row in started], SLOW_SHARE) or 0.0
            return [row for row in started if row.ttft_ms >= limit]
        case _:
            return rows


def _sort_key(row: Request, order: Order, moment: Moment) -> float:
    now_ns = moment.stored_ns
    ended = not row.is_open(now_ns)
    match order:
        case "ttft":
            return row.ttft_ms if 0 < row.started_ns <= now_ns else (now_ns - row.accepted_ns) / 1e6
        case "duration":
            return row.duration_ms if ended else (now_ns - row.accepted_ns) / 1e6
        case "tokens":
            return row.prompt_tokens + (row.completion_tokens if ended else 0)
        case "waited":
            return row.waited_at(moment.position)
        case _:
            return row.accepted_ns


def _row(row: Request, moment: Moment) -> Document:
    """A request as of a position: nothing of what came later."""
    now_ns = moment.stored_ns
    decided = bool(row.decisions) and row.decisions[0] <= moment.position
    ended, started = not row.is_open(now_ns), 0 < row.started_ns <= now_ns
    workers = [name for time_ns, name in row.workers if time_ns <= now_ns]
    return {
        **fields_of(
            row, "id", "endpoint", "model", "prompt_tokens", "max_tokens", "choices", "stream", "media"
        ),
        "time_ms": ms(row.accepted_ns),
        "completion_tokens": row.completion_tokens if ended else None,
        "cached_tokens": row.found_tokens if started and row.found_tokens >= 0 else None,
        "ttft_ms": row.ttft_ms if started else None,
        "duration_ms": row.duration_ms if ended else None,
        "waited_ms": row.waited_at(moment.position) if decided else None,
        "migrations": sum(time_ns <= now_ns for time_ns in row.failures),
        "state": row.state_at(now_ns),
        "reason": row.reason if ended else "",
        "error": _error(row, now_ns),
        "workers": list(dict.fromkeys(workers)),
        "tenant": tenant_text(row.tenant),
        "priority": row.priority,
        "position": row.decisions[0] if decided else None,
    }


# One request.


async def request_view(history: History, query: Query, *, contents: bool) -> Document:
    """A request as it was known at the position: stages, decisions, and with `contents` what was sent and answered by then."""
    row = request_named(history, query.required("id"))
    moment = await known_moment(history, row, query.optional("at"))
    events = await events_of(history.ports.requests, row, moment.stored_ns)
    decision_records = [decided async for decided in _decisions_of(history, row, moment.position)]
    shown = waterfall(events, [one.decision for one in decision_records])
    row_view = _row(row, moment)
    return {
        **row_view,
        **head(moment, notice_of(history)),
        "accepted_ms": row_view["time_ms"],
        "decided_position": row_view["position"],
        "position_end": await _position_after(history, row.ended_ns)
        if row_view["state"] == "ended"
        else None,
        "trace": row.trace,
        "media": _media(events),
        "spans": [
            {
                **fields_of(span, "name", "label", "choice", "worker", "attempt", "outcome", "detail"),
                "start_ms": ms(span.start_ns),
                "end_ms": ms(span.end_ns),
            }
            for span in shown.spans
        ],
        "marks": [{**mark._asdict(), "time_ms": ms(mark.time_ns)} for mark in shown.marks],
        "decisions": [_short(one) for one in decision_records],
        "contents": _contents(events) if contents else None,
        "explanation": _lines(history, decision_records, events),
    }


def request_named(history: History, name: str) -> Request:
    """The request of this id, or of a decision of this name. Raises `ApiError` 404."""
    row = history.requests.by_id.get(name) or history.requests.by_id.get(request_of(name))
    if row is None:
        raise not_found(
            f"The history has no request {name[:100]}: it may be older than the log keeps, or not be read yet."
        )
    return row


async def known_moment(history: History, row: Request, at: int | None) -> Moment:
    """The position at which a request, or a decision for it, is shown. Without one it is the newest, with all that is known. Raises `ApiError`."""
    moment = await history.moment(at)
    if at is None:
        # The request log may have its end before the pool log has anything new.
        return Moment(moment.position, max(moment.stored_ns, row.since_ns(FOREVER_NS)))
    if row.decisions and row.decisions[0] <= moment.position:
        # The logs are apart: a decision may be stored before the acceptance is.
        return Moment(moment.position, max(moment.stored_ns, row.accepted_ns))
    if row.accepted_ns > moment.stored_ns:
        raise ApiError(
            404, f"The request {row.id} is not accepted yet at position {moment.position}.", code="not_yet"
        )
    return moment


async def _position_after(history: History, time_ns: int) -> int:
    """The first position at which what the request log stored at a time is known; the newest one if there is none yet."""
    return min(await history.position_at(time_ns - 1) + 1, history.last.position)


async def _decisions_of(history: History, row: Request, until: int) -> AsyncIterator[StoredDecision]:
    for position in dict.fromkeys(position for position in row.decisions if position <= until):
        record = await history.record_at(position)
        for found in decisions_in(record) if record is not None else ():
            if request_of(found.decision.request) == row.id:
                yield found


def _short(found: StoredDecision) -> Document:
    decision = found.decision
    return {
        "id": decision.request,
        "stored": found.position,
        "time_ms": ms(found.stored_ns),
        "policy": decision.preferences.policy,
        **fields_of(decision, "position", "worker", "leg", "waited_ms", "algorithm"),
    }


def _media(events: Sequence[Stamped]) -> list[Document]:
    accepted = next((event for _, _, event in events if isinstance(event, RequestAccepted)), None)
    return [msgspec.structs.asdict(place) for place in accepted.media] if accepted is not None else []


def _contents(events: Sequence[Stamped]) -> Document | None:
    """What the request log has of the client's request and its answers; None if payloads are not recorded."""
    accepted = next((event for _, _, event in events if isinstance(event, RequestAccepted)), None)
    if accepted is None or accepted.payload != "full":
        return None
    ended = next((event for _, _, event in events if isinstance(event, RequestEnded)), None)
    return {
        "body": accepted.body.decode("utf-8", "replace"),
        "answers": [answer.decode("utf-8", "replace") for answer in ended.answers]
        if ended is not None
        else [],
    }


def _lines(
    history: History, decision_records: Sequence[StoredDecision], events: Sequence[Stamped]
) -> list[str]:
    """What `headwater explain` prints."""
    lines = []
    for one in decision_records:
        lines += describe(one.decision, one.position, (), history.engines).splitlines()
    return [*lines, *(event_line(event) for _, _, event in events)]
