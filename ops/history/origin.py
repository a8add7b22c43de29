"""How a cached block got to where it is: the event that stored it, and the decision whose prompt or answer it is part of."""

from collections.abc import AsyncIterator
from typing import Final, Literal, NamedTuple

import numpy as np

from headwater.events.ports import Log, Record
from headwater.ops.history.history import History
from headwater.router.index.prefix_index import PrefixIndex
from headwater.schemas import subjects
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.events.route import Decision
from headwater.schemas.hashing import unpack_hashes

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
    wanted = subjects.pool_subject(history.ports.ns, history.pool, "kv", worker)
    async for records in _backwards(history.log, until, wanted):
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
    wanted = subjects.pool_subject(history.ports.ns, history.pool, "route", subjects.ANY)
    late = [
        record
        async for piece in history.log.scan(
            stored.position, min(position, stored.position + STORED_LATE), [wanted]
        )
        for record in piece.records
    ]
    seen = 0
    async for records in _backwards(history.log, stored.position, wanted):
        made = [
            (record.position, event)
            for record in (*records, *late)
            for event in reversed(record.batch.events)
            if isinstance(event, Decision) and event.worker == worker
        ]
        late = []
        if made:
            # What another view folds in the meantime is folded again, so that nothing is kept of the index.
            index = (await history.state_at(position)).index
            found = next((one for one in made if leads_to(one[1], index, block)), None)
            if found is not None:
                return Cause(found[1].request, found[0], _part(found[1], index, block))
        seen += len(made)
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
    known = index.path(decision.deepest, decision.blocks) if decision.deepest else None
    return known is not None and depth < len(known) and int(known[depth]) == block


def _part(decision: Decision, index: PrefixIndex, block: int) -> Part:
    chain = index.path(block, BLOCKS_MAX)
    return "answer" if chain is not None and len(chain) > decision.blocks else "prompt"


async def _backwards(log: Log, until: int, subject: str) -> AsyncIterator[list[Record]]:
    """The messages of a subject up to a position in pieces that grow, the latest first."""
    first = (await log.bounds()).first
    edge, span, looked = until, 512, 0
    while edge >= first and looked < SCANNED_MAX:
        start = max(first - 1, edge - span)
        records = [record async for piece in log.scan(start, edge, [subject]) for record in piece.records]
        yield records[::-1]
        looked += edge - start
        edge = start
        span = min(2 * span, 65_536)
