"""The views of single records of the logs: one decision, events, and the next position where something happened."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Final, Literal, TypeVar

import msgspec

from headwater.actors.http.errors import ApiError, bad_request
from headwater.events.ports import Log, Record
from headwater.ops.console.query import Query, not_found
from headwater.ops.console.requests import known_moment, request_named
from headwater.ops.console.views import Document, head, ms, notice_of, outwards, tenant_text
from headwater.ops.history import decision as decisions
from headwater.ops.history.explanation import event_line
from headwater.ops.history.history import History, Moment
from headwater.ops.history.requests import Request, StoredDecision, attempt_of, regret_ms, request_of
from headwater.ops.terminal import fields_of
from headwater.router.decide import RECOMPUTABLE
from headwater.router.policies import POLICIES
from headwater.schemas import subjects
from headwater.schemas.events import Event, RequestEvent
from headwater.schemas.routing import DEFAULT_POLICY, Candidate, Decision, PolicyName, Weights
from headwater.schemas.subjects import ANY, POOL_KINDS

EVENTS_MAX: Final = 1_000
SCANNED_MAX: Final = 20_000
"""Messages that one call looks at for events or for the next one."""

STEP_MAX: Final = 100_000

CONTENT: Final = frozenset({"body", "answers", "tokens"})
"""Fields that have what clients sent and got."""

StepKind = Literal["message", "decision", "request", "fleet"]


# One decision.


async def decision_view(history: History, query: Query) -> Document:
    """A decision with every candidate's cost, what another policy or weights would have chosen, and what was known by the position of its outcome."""
    name = query.required("id")
    row = request_named(history, name)
    recorded = await decisions.find(history, name)
    if recorded is None:
        raise not_found(f"The request {row.id} has no decision {name[:100]}.")
    moment = await known_moment(history, row, query.optional("at"))
    if recorded.position > moment.position:
        raise ApiError(
            404, f"The decision {name[:100]} is not made yet at position {moment.position}.", code="not_yet"
        )
    decision = recorded.decision
    fleet = await history.fleet_at(await history.moment(decision.position))
    sizes = {worker.name: worker.block_size for worker in fleet.loads.workers.values()}
    candidates, notice = list(decision.candidates), ""
    if query.flag("all") and decision.scored > len(candidates):
        again = await decisions.candidates_of(history, recorded)
        candidates, notice = list(again.candidates) or candidates, again.problem
    return {
        **head(Moment(decision.position, decision.wall_ns), notice),
        **_decided(history, recorded),
        "candidates": _candidates(history, decision, candidates, sizes),
        "margin": decisions.margin_of(decision, candidates),
        "later": await decisions.later(history, recorded, moment.position),
        "found": _found(row, decision, sizes.get(decision.worker, 0), moment.stored_ns),
        "settled": not row.is_open(moment.stored_ns),
        "shadow": [
            {name: value for name, value in msgspec.structs.asdict(judgment).items() if name != "request"}
            for position, judgment in history.shadows.get(decision.request, ())
            if position <= moment.position
        ],
        "what_if": await _what_if(history, query, recorded, sizes),
    }


def _decided(history: History, recorded: StoredDecision) -> Document:
    """What a decision's record says besides its candidates."""
    decision = recorded.decision
    return {
        "id": decision.request,
        "stored": recorded.position,
        "request": request_of(decision.request),
        "router": f"{recorded.router[0]}.{recorded.router[1]}",
        **fields_of(
            decision, "prompt_tokens", "blocks", "seed", "algorithm", "scored", "waited_ms", "degraded", "leg"
        ),
        **fields_of(decision.preferences, "policy", "temperature"),
        "recomputable": decision.algorithm in RECOMPUTABLE,
        "unit": "ms" if decisions.is_timed(decision) else "blocks",
        "tenant": tenant_text(decision.tenant),
        "chosen": decision.worker,
        "why": decisions.explanation(decision, history.engines),
        "weights": msgspec.structs.asdict(decision.weights),
    }


CANDIDATE_FIELDS: Final = (
    *("worker", "leg", "score", "cached_blocks", "assumed_blocks", "lower_blocks", "requests", "loads_lora"),
    *("queue_ms", "prefill_ms", "transfer_ms", "itl_ms", "ttft_ms"),
)
"""What the page shows of a candidate as the decision has it."""


def _candidates(
    history: History, decision: Decision, candidates: Sequence[Candidate], sizes: dict[str, int]
) -> list[Document]:
    return [
        {
            **fields_of(candidate, *CANDIDATE_FIELDS),
            "engine": history.engines.get(candidate.worker, ""),
            "queued_tokens": candidate.prefill_tokens,
            "held_blocks": candidate.decode_blocks,
            "e2e_ms": decision.e2e_ms(candidate),
            "terms": [
                term._asdict()
                for term in decisions.terms_of(candidate, decision, sizes.get(candidate.worker, 0))
            ],
        }
        for candidate in sorted(candidates, key=lambda candidate: candidate.score)
    ]


def _found(row: Request, decision: Decision, block_size: int, now_ns: int) -> Document:
    """What the engine found by a time, beside what the router expected, of the decision that led to the first token."""
    started = 0 < row.started_ns <= now_ns
    led = started and bool(row.attempts) and row.attempts[-1] == attempt_of(decision.request, row.id)
    return {
        "cached_blocks": row.found_tokens // block_size
        if led and row.found_tokens >= 0 and block_size
        else None,
        "ttft_ms": row.ttft_ms if led else None,
        "expected_ttft_ms": decision.chosen.ttft_ms or None,
        "regret_ms": regret_ms(row) if led else None,
        "waited_ms": row.waited_ms if led else None,
        "started": started,
        "led": led,
    }


async def _what_if(
    history: History, query: Query, recorded: StoredDecision, sizes: dict[str, int]
) -> Document | None:
    overrides = query.below("weight.")
    if not query.text("policy") and not overrides:
        return None
    policy: PolicyName = query.choice(
        "policy", PolicyName, recorded.decision.preferences.policy or DEFAULT_POLICY
    )
    try:
        weights = decisions.weights_with(overrides)
    except ValueError as error:
        raise bad_request(f"{error}.") from error
    other = await decisions.what_if(history, recorded, policy, weights)
    document: Document = {"policy": policy, "weights": weights, "problem": other.problem}
    if other.decision is None:
        return {**document, "worker": "", "same": False, "why": "", "candidates": []}
    return {
        **document,
        "worker": other.decision.worker,
        "same": other.decision.worker == recorded.decision.worker,
        "why": decisions.explanation(other.decision, history.engines),
        "candidates": _candidates(history, other.decision, other.candidates, sizes),
    }


def policies_view() -> Document:
    """The policies and weights that *what if* can take."""
    return {
        "policies": [
            {"name": name, "text": (policy.__doc__ or "").split("\n")[0]} for name, policy in POLICIES.items()
        ],
        "weights": [
            {"name": field.name, "default": field.default} for field in msgspec.structs.fields(Weights)
        ],
    }


# Events.


async def events_view(history: History, query: Query, *, contents: bool) -> Document:
    """The events before or after a position, of the pool log and, by time, of the request log."""
    moment = await history.moment(query.optional("at"))
    forward = query.choice("direction", Literal["before", "after"], "before") == "after"
    limit = query.integer("limit", 200, 1, EVENTS_MAX)
    kinds = [kind for kind in query.text("kind").split(",") if kind]
    unknown = [kind for kind in kinds if kind not in (*POOL_KINDS, "req")]
    if unknown:
        raise bad_request(
            f"kind: there is no kind {unknown[0][:40]!r}; kinds are {', '.join((*POOL_KINDS, 'req'))}.",
            param="kind",
        )
    documents: list[Document] = []
    more = False
    if not kinds or set(kinds) != {"req"}:
        patterns = [
            subjects.pool_subject(history.ports.ns, history.pool, kind, ANY)
            for kind in POOL_KINDS
            if kind in kinds
        ]
        rows, cut = await _scan_events(
            history.log, moment.position, forward, limit, patterns, query, contents
        )
        documents, more = documents + rows, more or cut
    if not kinds or "req" in kinds:
        at = await history.ports.requests.position_at(moment.stored_ns)
        rows, cut = await _scan_events(history.ports.requests, at, forward, limit, (), query, contents)
        documents, more = documents + rows, more or cut
    documents.sort(key=lambda document: (document["time_ms"], document["position"], document["index"]))
    page = documents[:limit] if forward else documents[-limit:]
    return {**head(moment, notice_of(history)), "events": page, "more": more or len(page) < len(documents)}


async def _scan_events(
    log: Log, position: int, forward: bool, limit: int, patterns: Sequence[str], query: Query, contents: bool
) -> tuple[list[Document], bool]:
    """Up to `limit` events after a position, or the last ones before it, the nearest first; and whether there may be more."""
    documents: list[Document] = []
    more = False
    async for records, has_more in outwards(log, position, patterns, forward=forward, most=SCANNED_MAX):
        for record in records:
            rows = list(_events(record, query, contents))
            documents += rows if forward else reversed(rows)
        more = has_more
        if len(documents) >= limit:
            break
    return documents[:limit], len(documents) > limit or more


def _events(record: Record, query: Query, contents: bool) -> Iterator[Document]:
    name, writer, text = (query.text(field) for field in ("event", "writer", "text"))
    if writer and record.batch.writer != writer:
        return
    for index, event in enumerate(record.batch.events):
        tag = str(type(event).__struct_config__.tag)
        if name and tag != name:
            continue
        line = _line(event)
        if text and text.lower() not in line.lower():
            continue
        yield {
            "position": record.position,
            "index": index,
            "time_ms": ms(record.stored_ns),
            "kind": tag.partition(".")[0]
            if isinstance(event, RequestEvent)
            else subjects.pool_kind(record.subject),
            "event": tag,
            "writer": record.batch.writer,
            "epoch": record.batch.epoch,
            "text": line,
            "fields": _fields(event, contents=contents),
            "request": request_of(event.request)
            if isinstance(event, Decision)
            else getattr(event, "request", ""),
            "worker": getattr(event, "worker", ""),
        }


def _line(event: Event) -> str:
    """An event in a line."""
    if isinstance(event, Decision):
        return f"{event.request} to {event.worker}, cost {event.chosen.score:.2f}, {event.chosen.cached_blocks} of {event.blocks} blocks cached"
    line = event_line(event)
    return line if len(line) <= 300 else f"{line[:299]}…"


def _fields(event: Event, *, contents: bool) -> Document:
    """All fields; block hashes by their number, and contents only where they may be shown."""
    fields: Document = {}
    for name, value in msgspec.structs.asdict(event).items():
        if name in CONTENT and not contents:
            continue
        if isinstance(value, bytes):
            fields[name] = (
                value.decode("utf-8", "replace")
                if name in CONTENT
                else f"{len(value)} bytes {value[:16].hex()}…"
                if len(value) > 16
                else value.hex()
            )
        else:
            fields[name] = msgspec.to_builtins(value, enc_hook=str)
    return fields


# Positions.


async def position_view(history: History, query: Query) -> Document:
    """The position at a time."""
    time_ms = query.number("time_ms", -1.0, 0, 1e14)
    if time_ms < 0:
        raise bad_request("time_ms is missing: Unix time in milliseconds.", param="time_ms")
    return head(await history.moment(await history.position_at(int(time_ms * 1e6))))


async def step_view(history: History, query: Query) -> Document:
    """The next or previous position where a message, a decision, a request or a change of the fleet is."""
    moment = await history.moment(query.optional("at"))
    by: StepKind = query.choice("by", StepKind, "message")
    forward = query.choice("direction", Literal["1", "-1"], "1") == "1"
    if by == "fleet":
        step = _step_fleet(history, moment, forward)
    elif by == "request":
        step = _step_request(history, moment, forward)
    else:
        step = await _step_log(history, moment, forward, by)
    if step is None:
        raise not_found(f"There is no {'later' if forward else 'earlier'} {by} in this history.")
    position, description, request = step
    return {**head(await history.moment(position)), "what": description, "request": request}


Step = tuple[int, str, str]
ItemT = TypeVar("ItemT")


def _beside(
    several: Sequence[ItemT], position: int, position_of: Callable[[ItemT], int], *, forward: bool
) -> ItemT | None:
    """The next or previous of several, which are in the order of their positions."""
    if forward:
        at = bisect_right(several, position, key=position_of)
    else:
        at = bisect_left(several, position, key=position_of) - 1
    return several[at] if 0 <= at < len(several) else None


def _step_fleet(history: History, moment: Moment, forward: bool) -> Step | None:
    mark = _beside(history.fleet.marks, moment.position, attrgetter("position"), forward=forward)
    return (mark.position, f"{mark.worker} {mark.text}", "") if mark is not None else None


def _step_request(history: History, moment: Moment, forward: bool) -> Step | None:
    """Requests by the position of their first decision."""
    near = 3_600_000_000_000
    rows = history.requests.accepted_between(
        moment.stored_ns - (near if not forward else 60_000_000_000),
        moment.stored_ns + (near if forward else 0),
    )
    starts = sorted((row.decisions[0], row.id) for row in rows if row.decisions)
    step = _beside(starts, moment.position, itemgetter(0), forward=forward)
    return (step[0], f"request {step[1]}", step[1]) if step is not None else None


async def _step_log(history: History, moment: Moment, forward: bool, by: StepKind) -> Step | None:
    patterns = (
        [] if by == "message" else [subjects.pool_subject(history.ports.ns, history.pool, "route", ANY)]
    )
    start = moment.position if forward else moment.position - 1
    async for records, _ in outwards(history.log, start, patterns, forward=forward, most=STEP_MAX):
        for record in records:
            for event in record.batch.events:
                if by == "message" or isinstance(event, Decision):
                    request = request_of(event.request) if isinstance(event, Decision) else ""
                    return record.position, _line(event), request
    return None
