"""The views of a fleet at a position: workers, lanes, hand-offs, stuck requests, and what two positions differ in.

Each is a function of the history and the position alone, so that who opens the same link sees the same.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import numpy as np

from headwater.events.ports import Log, Record
from headwater.ops.console.query import Query
from headwater.ops.history import series
from headwater.ops.history.findings import BEFORE_NS, RECENT_NS, STUCK_NS, findings, is_stuck
from headwater.ops.history.history import History, Mark, Moment
from headwater.ops.history.requests import Request
from headwater.ops.history.stuck import OpenRequests, Stuck, Surroundings, stuck_requests
from headwater.ops.terminal import fields_of
from headwater.router.worker import Worker

Document = dict[str, Any]

WINDOW_S_MAX: Final = 24 * 3600
COLUMNS_MAX: Final = 2_000
LEFT_NS: Final = 30 * 60 * 1_000_000_000
LANES_MAX: Final = 2_000


def ms(time_ns: int) -> float | None:
    """A time of the log as Unix time in milliseconds; None for none."""
    return time_ns / 1e6 if time_ns else None


def head(moment: Moment, notice: str = "") -> Document:
    """What every view begins with."""
    return {"position": moment.position, "time_ms": ms(moment.stored_ns), "notice": notice}


def notice_of(history: History) -> str:
    """Says that the history is still being read, or where it begins."""
    if not history.caught_up.is_set():
        done = (history.indexed - history.indexed_from) / max(1, history.head - history.indexed_from)
        return f"The history is being read: {done:.0%} of the log so far."
    if history.indexed_from:
        return f"The log keeps nothing before position {history.indexed_from}."
    return ""


SPAN_MAX: Final = 65_536
"""Positions that are read at once, looking for something."""


async def outwards(
    log: Log, position: int, subjects: Sequence[str], *, forward: bool, most: int
) -> AsyncIterator[tuple[list[Record], bool]]:
    """The messages after a position, or those up to it, the nearest first, in pieces that grow; and whether the log has more beyond each.

    It ends after `most` positions.
    """
    first, last = await log.bounds()
    span, edge = 256, position
    while abs(edge - position) < most and (edge < last if forward else edge >= first):
        start, stop = (edge, edge + span) if forward else (max(first - 1, edge - span), edge)
        records = [record async for piece in log.scan(start, stop, subjects) for record in piece.records]
        edge = stop if forward else start
        yield (records, edge < last) if forward else (records[::-1], edge >= first)
        span = min(2 * span, SPAN_MAX)


async def log_view(history: History) -> Document:
    """The bounds of the log and of the history."""
    first = history.fleet.rungs[0]
    oldest_moment = history.first_moment
    ladder = await history.ladder()
    return {
        **head(history.last, notice_of(history)),
        "first": history.indexed_from,
        "last": history.last.position,
        "first_ms": ms(oldest_moment.stored_ns or first.stored_ns),
        "last_ms": ms(history.last.stored_ns),
        "indexed": history.indexed,
        "indexed_from": history.indexed_from,
        "head": history.head,
        "snapshots": ladder.snapshots,
        "bookmarks": ladder.bookmarks,
    }


async def fleet_view(history: History, query: Query) -> Document:
    """The workers, what they do, and what is wrong."""
    moment = await history.moment(query.optional("at"))
    marks = history.fleet.marks_between(moment.stored_ns - LEFT_NS, moment.stored_ns)
    fleet = await history.fleet_at(moment)
    workers = sorted(fleet.loads.workers.values(), key=lambda entry: entry.name)
    recent = series.hits_by_worker(history.requests, moment.stored_ns - RECENT_NS, moment.stored_ns)
    recent_marks = [mark for mark in marks if mark.time_ns > moment.stored_ns - BEFORE_NS]
    rates = series.rates(history.requests, moment.stored_ns - 60_000_000_000, moment.stored_ns)
    return {
        **head(moment, notice_of(history)),
        "workers": [_worker(entry, history, recent, moment) for entry in workers],
        "left": [
            {"name": mark.worker, "epoch": mark.epoch, "time_ms": ms(mark.time_ns), "reason": mark.text}
            for mark in reversed(marks)
            if mark.kind == "left"
        ],
        "totals": {
            "workers": len(workers),
            "ready": sum(entry.takes_requests for entry in workers),
            "running": sum(entry.running for entry in workers),
            "waiting": sum(entry.waiting for entry in workers),
            "used_blocks": sum(entry.used_blocks for entry in workers),
            "total_blocks": sum(entry.total_blocks for entry in workers),
            "requests_open": len(history.requests.open_at(moment.stored_ns)),
        },
        "rates": {"window_s": 60, **rates._asdict()},
        "engine_weights": fleet.loads.engine_weights,
        "splits": {name: split.event.shares for name, split in sorted(fleet.loads.splits.items())},
        "findings": [entry._asdict() for entry in findings(fleet, history.requests, recent_marks)],
    }


WORKER_FIELDS: Final = (
    *("name", "epoch", "engine", "revision", "role", "instance", "tier", "taints", "loras", "lora_slots"),
    *("running", "waiting", "used_blocks", "total_blocks", "block_size", "max_running", "pace"),
)
"""What the page shows of a worker as the fold has it."""


def _worker(worker: Worker, history: History, hits: dict[str, float], moment: Moment) -> Document:
    tokens, _ = worker.promised(moment.stored_ns)
    joined = history.fleet.joined.get((worker.name, worker.epoch))
    return {
        **fields_of(worker, *WORKER_FIELDS),
        "state": "draining" if worker.draining else worker.state,
        "joined_ms": ms(joined) if joined else None,
        "requests": len(worker.requests),
        "queued_tokens": tokens,
        "step_ms": worker.step_ms or None,
        "hit_rate": hits.get(worker.name),
    }


async def asked_window(history: History, query: Query) -> tuple[Moment, series.Window]:
    """The position that a query names, and the window before it."""
    moment = await history.moment(query.optional("at"))
    seconds = query.number("window_s", 300, 1, WINDOW_S_MAX)
    columns = query.integer("columns", 240, 1, COLUMNS_MAX)
    return moment, series.Window(moment.stored_ns - int(seconds * 1e9), moment.stored_ns, columns)


def marks_shown(marks: Sequence[Mark]) -> list[Document]:
    """Changes of the fleet for people."""
    return [
        {**fields_of(mark, "kind", "text", "worker", "position"), "time_ms": ms(mark.time_ns)}
        for mark in marks
    ]


def lanes_between(history: History, window: series.Window, marks: Sequence[Mark]) -> dict[str, series.Lane]:
    """The lanes of the workers that have samples in a window, by name."""
    left_ns: dict[str, int] = {}
    for mark in marks:
        if mark.kind == "left":
            left_ns[mark.worker] = mark.time_ns
        elif mark.kind == "joined":
            left_ns.pop(mark.worker, None)
    lanes = {}
    for name, samples in sorted(history.fleet.samples.items())[:LANES_MAX]:
        lane = series.lane(samples, window, left_ns.get(name, 0))
        if not np.isnan(lane.running).all():
            lanes[name] = lane
    return lanes


async def lanes_view(history: History, query: Query) -> Document:
    """The load of each worker over the window before the position."""
    moment, window = await asked_window(history, query)
    marks = history.fleet.marks_between(window.from_ns, window.to_ns)
    by_worker: defaultdict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_worker[mark.worker].append(mark)
    fleet = await history.fleet_at(moment)
    roles = {name: worker.role for name, worker in fleet.loads.workers.items()}
    lanes = lanes_between(history, window, marks)
    limit, worker = query.integer("limit", 200, 1, LANES_MAX), query.text("worker")
    shown = [name for name in lanes if not worker or name == worker]
    if len(shown) > limit:
        # Those with most to do; who looks for another one names it.
        busiest = sorted(shown, key=lambda name: -np.nansum(lanes[name].running + lanes[name].waiting))
        shown = sorted(busiest[:limit])
    return {
        **head(moment, notice_of(history)),
        **axis_of(window),
        "total": len(lanes),
        "workers": [
            {
                "name": name,
                "engine": history.engines.get(name, ""),
                "role": roles.get(name, ""),
                **{field: values.tolist() for field, values in lanes[name]._asdict().items()},
                "marks": marks_shown(by_worker[name]),
            }
            for name in shown
        ],
    }


def axis_of(window: series.Window) -> Document:
    """The times of a window's columns."""
    return {
        "from_ms": window.from_ns / 1e6,
        "to_ms": window.to_ns / 1e6,
        "step_ms": window.step_ns / 1e6,
        "columns": window.columns,
    }


NO_TENANT: Final = "none"
"""Selects requests without a tenant."""


def tenant_text(digest: int) -> str:
    """A tenant as the page names it; "" for none."""
    return f"{digest & (1 << 64) - 1:016x}" if digest else ""


async def handoffs_view(history: History, query: Query) -> Document:
    """The hand-offs of KV between prefill and decode workers."""
    moment, window = await asked_window(history, query)
    handoffs = []
    for row in history.requests.accepted_between(window.from_ns, window.to_ns):
        handoffs += _handoffs(row, moment.stored_ns)
    return {**head(moment, notice_of(history)), "handoffs": handoffs[::-1]}


def _handoffs(row: Request, now_ns: int) -> list[Document]:
    """Each time that a prompt was computed apart, until another worker had its KV."""
    handoffs = []
    steps = [(time_ns, state) for time_ns, state in row.steps if time_ns <= now_ns]
    for number, (time_ns, state) in enumerate(steps):
        if state != "handoff":
            continue
        sender = row.worker_at(time_ns)
        after = steps[number + 1] if number + 1 < len(steps) else None
        # What follows a later attempt is not of this one.
        is_last = all(other != "handoff" for _, other in steps[number + 1 :])
        receiver = row.worker_at(after[0]) if after is not None and after[1] == "decode" else ""
        started = row.started_ns if is_last and time_ns <= row.started_ns <= now_ns else 0
        if not is_last or (after is not None and after[1] != "decode"):
            state_text = "abandoned"
        elif started:
            state_text = "done"
        else:
            state_text = "transferring" if receiver else "prefilled"
        end_ns = started or (after[0] if after is not None and state_text == "abandoned" else now_ns)
        handoffs.append(
            {
                "id": f"{row.id}/{number}",
                "request": row.id,
                "from": sender,
                "to": receiver,
                "state": state_text,
                "prefilled_ms": ms(time_ns),
                "started_ms": ms(started),
                "duration_ms": (end_ns - time_ns) / 1e6,
                "tokens": row.prompt_tokens,
            }
        )
    return handoffs


async def stuck_view(history: History, query: Query) -> Document:
    """Open requests without progress, and what each waits for, as `headwater stuck` says it."""
    moment = await history.moment(query.optional("at"))
    now_ns = moment.stored_ns
    rows = [row for row in history.requests.open_at(now_ns) if is_stuck(row, now_ns)]
    folded = OpenRequests()
    if rows:
        log = history.ports.requests
        until = await log.position_at(now_ns)
        async for piece in log.scan(min(row.log_position for row in rows) - 1, until):
            for record in piece.records:
                folded.fold(record)
    fleet = await history.fleet_at(moment)
    around = Surroundings(
        history.pool,
        now_ns,
        fleet.loads.workers,
        reported_ns={
            name: samples.times[at]
            for name, samples in history.fleet.samples.items()
            if (at := bisect_right(samples.times, now_ns) - 1) >= 0
        },
    )
    open_requests = [folded.open[row.id] for row in rows if row.id in folded.open]
    return {
        **head(moment, notice_of(history)),
        "stuck": [_stuck(stuck) for stuck in stuck_requests(open_requests, around, STUCK_NS)],
    }


def _stuck(stuck: Stuck) -> Document:
    """A request without progress; of several choices the first is shown."""
    waiting = stuck.waiting[0] if stuck.waiting else None
    return {
        "request": stuck.request,
        "state": waiting.state if waiting else "ended",
        "since_ms": ms(waiting.since_ns if waiting else stuck.accepted_ns),
        "for_ms": stuck.quiet_ns / 1e6,
        "waits_for": "; ".join([waiting.waits_for, *waiting.facts]) if waiting else "its end",
        "worker": waiting.worker if waiting else "",
        "remedy": waiting.remedy if waiting else "look at its edge",
    }


DIFF_FIELDS: Final = (
    *("epoch", "state", "draining", "role", "loras", "taints"),
    *("running", "waiting", "used_blocks", "prefill_tokens"),
)
"""What is compared of a worker, besides the number of its requests."""


async def diff_view(history: History, query: Query) -> Document:
    """What differs between the fleet at two positions."""
    first, second = sorted((query.integer("a", 0, 0, 1 << 62), query.integer("b", 1 << 62, 0, 1 << 62)))
    a, b = await history.moment(first), await history.moment(second)
    before = {worker.name: _facts(worker) for worker in (await history.fleet_at(a)).loads.workers.values()}
    after = {worker.name: _facts(worker) for worker in (await history.fleet_at(b)).loads.workers.values()}
    changes: list[Document] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            values = ("present", "gone") if new is None else ("absent", "present")
            changes.append({"what": f"worker {name}", "field": "", "before": values[0], "after": values[1]})
            continue
        changes += [
            {"what": f"worker {name}", "field": field, "before": old[field], "after": new[field]}
            for field in old
            if old[field] != new[field]
        ]
    accepted = history.requests.accepted_between(a.stored_ns, b.stored_ns)
    counts = Counter(row.reason or "open" for row in accepted)
    return {
        **head(b),
        "a": a.position,
        "b": b.position,
        "a_ms": ms(a.stored_ns),
        "b_ms": ms(b.stored_ns),
        "changes": changes,
        "counts": {
            "messages": b.position - a.position,
            "requests": len(accepted),
            "decisions": sum(len(row.decisions) for row in accepted),
            **{
                f"requests that ended with {reason}" if reason != "open" else "requests still open": n
                for reason, n in counts.items()
            },
        },
    }


def _facts(worker: Worker) -> Document:
    return {**fields_of(worker, *DIFF_FIELDS), "requests": len(worker.requests)}
