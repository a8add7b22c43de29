"""The views of what is cached: the prefix tree with its use and its holders, and how a block got to where it is.

The latter names the event that stored a block, and the decision whose prompt or answer it is part of.
"""

from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from headwater.actors.http.errors import bad_request
from headwater.ops.console.query import Query, not_found
from headwater.ops.console.views import WINDOW_S_MAX, Document, head, ms, notice_of, outwards
from headwater.ops.history.history import History
from headwater.ops.history.requests import decisions_in, request_of
from headwater.ops.terminal import fields_of
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.index.tree import TokenRun, Tree, tree
from headwater.schemas import subjects
from headwater.schemas.events import TIER_NAMES, BlocksStored
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.routing import Decision

SCANNED_MAX: Final = 400_000
"""Positions of the log that are looked at for an event; those of other subjects are not transferred."""

DECISIONS_MAX: Final = 256
"""Decisions for the worker that are looked at."""

STORED_LATE: Final = 64
"""How many messages after a block was stored the log may store the decision that led to it."""

BLOCKS_MAX: Final = 1 << 20

Part = Literal["prompt", "answer"]


class Stored(NamedTuple):
    """The event that stored a block last, up to a position: at `position` and `stored_ns`, on tier number `tier`."""

    position: int
    stored_ns: int
    tier: int


class Cause(NamedTuple):
    """A decision, stored at `position`, after which its worker stored a block: of its prompt, or behind it."""

    decision: str
    position: int
    part: Part


async def stored_by(history: History, worker: str, block: int, until: int) -> Stored | None:
    """The latest event of a worker that stored a block, up to a position; None if the log has none, or it is too far back."""
    subject = subjects.pool_subject(history.ports.ns, history.pool, "kv", worker)
    async for records, _ in outwards(history.log, until, [subject], forward=False, most=SCANNED_MAX):
        for record in records:
            for event in reversed(record.batch.events):
                if (
                    isinstance(event, BlocksStored)
                    and (unpack_hashes(event.hashes) == np.uint64(block)).any()
                ):
                    return Stored(record.position, record.stored_ns, event.tier)
    return None


async def cause_of(history: History, position: int, worker: str, block: int, stored: Stored) -> Cause | None:
    """The decision for a worker whose prompt or answer has a block that it stored, by the paths of the index at a position."""
    subject = subjects.pool_subject(history.ports.ns, history.pool, "route", subjects.ANY)
    late = [
        record
        async for piece in history.log.scan(
            stored.position, min(position, stored.position + STORED_LATE), [subject]
        )
        for record in piece.records
    ]
    seen = 0
    async for records, _ in outwards(
        history.log, stored.position, [subject], forward=False, most=SCANNED_MAX
    ):
        worker_decisions = [
            stored_decision
            for record in (*records, *late)
            for stored_decision in reversed(list(decisions_in(record)))
            if stored_decision.decision.worker == worker
        ]
        late = []
        if worker_decisions:
            # What another view folds in the meantime is folded again, so that nothing is kept of the index.
            index = (await history.state_at(position)).index
            match = next(
                (
                    stored_decision
                    for stored_decision in worker_decisions
                    if leads_to(stored_decision.decision, index, block)
                ),
                None,
            )
            if match is not None:
                return Cause(match.decision.request, match.position, _part(match.decision, index, block))
        seen += len(worker_decisions)
        if seen >= DECISIONS_MAX:
            break
    return None


def leads_to(decision: Decision, index: PrefixIndex, block: int) -> bool:
    """Is a block one that the worker of a decision was to compute, or one of the answer behind its prompt?"""
    chain = index.path(block, BLOCKS_MAX)
    if chain is None:
        return False
    if (chain == np.uint64(decision.last)).any():
        return True
    depth = len(chain) - 1
    if not decision.chosen.cached_blocks <= depth < decision.blocks:
        return False
    if decision.following and (chain == np.uint64(decision.following)).any():
        return True
    # Another worker had what this one computed.
    deepest_path = index.path(decision.deepest, decision.blocks) if decision.deepest else None
    return deepest_path is not None and depth < len(deepest_path) and int(deepest_path[depth]) == block


def _part(decision: Decision, index: PrefixIndex, block: int) -> Part:
    chain = index.path(block, BLOCKS_MAX)
    return "answer" if chain is not None and len(chain) > decision.blocks else "prompt"


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
        prefix_tree = tree(state.index, worker=worker, depth=depth, limit=limit, used=uses)
    except LookupError as error:
        raise not_found(f"{error.args[0]}.") from error
    sizes = {member.block_size for member in state.loads.workers.values()}
    return {
        **head(moment, notice_of(history)),
        **fields_of(prefix_tree, "blocks", "workers", "total", "refused"),
        "cold": sorted(state.cold),
        "block_size": min(sizes) if len(sizes) == 1 else None,
        "held": dict(sorted(state.index.blocks.items())),
        "window_s": seconds,
        "uses": len(uses.blocks),
        "runs": _runs(prefix_tree, worker),
    }


def _runs(prefix_tree: Tree, first: str) -> list[Document]:
    """The runs with their holders, one for each worker and tier, that of the name `first` at the front, and with partial holders."""
    above: list[tuple[TokenRun, frozenset[str]]] = []
    shown = []
    for run in prefix_tree.runs:
        del above[run.level :]
        full_holders = frozenset(worker for workers in run.held.values() for worker in workers)
        partial, more = _partial(above, full_holders)
        above.append((run, full_holders))
        holders = [(worker, tier) for tier, workers in run.held.items() for worker in workers]
        holders.sort(key=lambda holder: holder[0] != first)
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
    above: list[tuple[TokenRun, frozenset[str]]], full_holders: frozenset[str]
) -> tuple[list[Document], bool]:
    """Workers that hold some of the blocks before a run, but not the run: to which depth, on which tier, most first; and whether there are more."""
    partial: list[Document] = []
    seen = set(full_holders)
    for level in range(len(above) - 1, -1, -1):
        run, holders = above[level]
        for worker in sorted(holders - seen):
            if any(worker not in others for _, others in above[:level]):
                # It lacks a run further up, and holds this one in vain.
                continue
            if len(partial) == PARTIAL_MAX:
                return partial, True
            tier = next(tier for tier, workers in run.held.items() if worker in workers)
            depth = run.depth + run.blocks if run.depth >= 0 else None
            partial.append({"worker": worker, "tier": tier, "depth": depth})
            seen.add(worker)
    return partial, False


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
            **cause._asdict(),
            "request": request_of(cause.decision),
        }
        if cause is not None
        else None,
    }
