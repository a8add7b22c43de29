"""The views of what is cached: the prefix tree with its use and its holders, and how a block got to where it is."""

from typing import Final

import msgspec

from headwater.actors.http.errors import bad_request
from headwater.ops.console.query import Query, not_found
from headwater.ops.console.views import WINDOW_S_MAX, Document, head, ms, notice_of
from headwater.ops.history.history import History
from headwater.ops.history.origin import cause_of, stored_by
from headwater.ops.history.requests import request_of
from headwater.router.index.tree import TokenRun, Tree, tree
from headwater.schemas.events.kv import TIER_NAMES

RUNS_MAX: Final = 5_000

HOLDERS_MAX: Final = 24
"""Holders listed of a run."""

PARTIAL_MAX: Final = 8
"""Workers listed that hold only a part of a prefix: those with most of it."""


async def tree_view(history: History, query: Query) -> Document:
    """What is cached where, from the whole state at the position, and how much the decisions of the window before it used it."""
    moment = await history.moment(query.optional("at"))
    worker, depth = query.text("worker"), query.integer("depth", -1, -1, 1 << 31)
    limit = query.integer("limit", 200, 1, RUNS_MAX)
    known_s = (moment.stored_ns - history.first_moment.stored_ns) / 1e9
    # Decisions before the history, as of a capture, are not known.
    seconds = min(query.number("window_s", 300, 1, WINDOW_S_MAX), max(0.0, known_s))
    uses = history.requests.uses.between(moment.stored_ns - int(seconds * 1e9), moment.position)
    state = await history.state_at(moment.position)
    try:
        found = tree(state.index, worker=worker, depth=depth, limit=limit, used=uses)
    except LookupError as error:
        raise not_found(f"{error.args[0]}.") from error
    sizes = {one.block_size for one in state.loads.workers.values()}
    return {
        **head(moment, notice_of(history)),
        "blocks": found.blocks,
        "workers": found.workers,
        "total": found.total,
        "refused": found.refused,
        "cold": sorted(state.cold),
        "block_size": min(sizes) if len(sizes) == 1 else None,
        "held": dict(sorted(state.index.blocks.items())),
        "window_s": seconds,
        "uses": len(uses.blocks),
        "runs": _runs(found, worker),
    }


def _runs(found: Tree, first: str) -> list[Document]:
    """The runs with their holders, one for each worker and tier, that of the name `first` at the front, and with partial holders."""
    above: list[tuple[TokenRun, frozenset[str]]] = []
    shown = []
    for run in found.runs:
        del above[run.level :]
        whole = frozenset(worker for workers in run.held.values() for worker in workers)
        partial, more = _partial(above, whole)
        above.append((run, whole))
        holders = [(worker, tier) for tier, workers in run.held.items() for worker in workers]
        holders.sort(key=lambda one: one[0] != first)
        shown.append(
            {
                **{
                    name: value
                    for name, value in msgspec.structs.asdict(run).items()
                    if name not in ("held", "used_ns")
                },
                "used_ms": ms(run.used_ns),
                "holders": [{"worker": worker, "tier": tier} for worker, tier in holders[:HOLDERS_MAX]],
                "holders_total": len(holders),
                "partial": partial,
                "partial_more": more,
            }
        )
    return shown


def _partial(
    above: list[tuple[TokenRun, frozenset[str]]], whole: frozenset[str]
) -> tuple[list[Document], bool]:
    """Workers that hold some of the blocks before a run, but not the run: to which depth, on which tier, most first; and whether there are more."""
    found: list[Document] = []
    seen = set(whole)
    for level in range(len(above) - 1, -1, -1):
        run, holders = above[level]
        for worker in sorted(holders - seen):
            if any(worker not in others for _, others in above[:level]):
                # It lacks a run further up, and holds this one in vain.
                continue
            if len(found) == PARTIAL_MAX:
                return found, True
            tier = next(tier for tier, workers in run.held.items() if worker in workers)
            depth = run.depth + run.blocks if run.depth >= 0 else None
            found.append({"worker": worker, "tier": tier, "depth": depth})
            seen.add(worker)
    return found, False


async def origin_view(history: History, query: Query) -> Document:
    """How a worker came to hold a block: the event that stored it, and the decision and request that led to it."""
    moment = await history.moment(query.optional("at"))
    worker = query.required("worker")
    try:
        block = int(query.required("block"), 16)
    except ValueError:
        block = -1
    if not 0 < block < 1 << 64:
        raise bad_request("block must be the hash of a block in hexadecimal.", param="block")
    stored = await stored_by(history, worker, block, moment.position)
    document = {**head(moment, notice_of(history)), "worker": worker, "block": f"{block:016x}"}
    if stored is None:
        return document | {"stored": None, "cause": None}
    cause = await cause_of(history, moment.position, worker, block, stored)
    return {
        **document,
        "stored": {
            "position": stored.position,
            "time_ms": ms(stored.stored_ns),
            "tier": TIER_NAMES[stored.tier],
        },
        "cause": {
            "decision": cause.decision,
            "request": request_of(cause.decision),
            "position": cause.position,
            "part": cause.part,
        }
        if cause is not None
        else None,
    }
