"""The router's state: a fold of the pool log. `apply` is total, silent and deterministic.

No clock, no randomness, no IO, no logging happens here. An event that fits nothing (an unknown worker, an
epoch that is over) changes nothing, so folding never fails.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.events.chain import Break, Chains, Head
from headwater.events.log import Record, Slice, Unreadable
from headwater.events.snapshots import Snapshot
from headwater.router.assumed import Assumed
from headwater.router.index import MAX_BLOCKS, PrefixIndex
from headwater.router.load import Loads
from headwater.schemas.envelope import Batch, Event
from headwater.schemas.fleet import WorkerChanged, WorkerDraining, WorkerJoined, WorkerLeft
from headwater.schemas.hashing import HASH_BYTES, U64, unpack_hashes
from headwater.schemas.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.load import LoadReported, RequestsHeld
from headwater.schemas.pool import LogEvent
from headwater.schemas.route import Decision, DecisionVoided, Shadowed
from headwater.schemas.subjects import writer_of

_canonical = msgspec.msgpack.Encoder(order="deterministic")


class StoredChains(NamedTuple):
    """Blocks that several events stored one after the other: chain i is the next `lengths[i]` hashes."""

    tier: int
    parents: U64
    lengths: NDArray[np.int64]
    hashes: U64


class RouterState:
    """Index, loads and the log position they stand at.

    `cold` names workers whose announcements have a hole: their cache is not counted on until they announce
    it anew. `log` is the identity of the log that `position` is in. `whole` is False for a fold that does not begin at
    the log's first message; `since` is then its first position, -1 where that is not known, and 0 for a whole one.
    """

    def __init__(self, *, whole: bool = True, max_blocks: int = MAX_BLOCKS) -> None:
        self.position = 0
        self.log = ""
        self.chains = Chains(whole=whole)
        self.since = 0 if whole else -1
        self.index = PrefixIndex(max_blocks)
        self.loads = Loads()
        self.cold: set[str] = set()

    def apply(self, record: Record) -> Break | None:
        """Fold one log message; returns what is wrong with its place in the chain."""
        events, broken = self.admit(record)
        for event in events:
            self.apply_to_index(record.batch, event)
            apply_to_loads(self.loads, record, event)
        return broken

    def admit(self, record: Record) -> tuple[Sequence[LogEvent | StoredChains], Break | None]:
        """Take a message's place: its events, which the caller folds, and what is wrong with its place.

        A worker of whose messages one is missing is cold from here on. Stored blocks that follow each other come as
        one: folding them together is several times faster.
        """
        fold, broken = self.chains.follow(record)
        if broken is not None:
            self._distrust(broken.writer)
        self.position = record.position
        return (together(record.batch.events) if fold else ()), broken

    def skip(self, unreadable: Unreadable) -> None:
        """Pass over a message that can not be read: what its writer said there is lost."""
        self._distrust(writer_of(unreadable.subject))
        self.position = unreadable.position

    def _distrust(self, writer: str) -> None:
        if writer in self.loads.workers:
            self.cold.add(writer)

    def apply_to_index(self, batch: Batch[Any], event: Event | StoredChains) -> None:
        """The part of the fold that decisions never change. Call before `apply_to_loads`."""
        match event:
            case StoredChains():
                if self._speaks(batch):
                    self.index.store_chains(
                        batch.writer, event.tier, event.parents, event.lengths, event.hashes
                    )
            case BlocksStored():
                if self._speaks(batch):
                    hashes = unpack_hashes(event.hashes)
                    self.index.store(batch.writer, event.tier, event.parent, hashes)
            case BlocksRemoved():
                if self._speaks(batch):
                    self.index.remove(batch.writer, event.tier, unpack_hashes(event.hashes))
            case BlocksCleared():
                if self._speaks(batch):
                    self.index.clear(batch.writer)
                    self.cold.discard(batch.writer)
            case KvGap():
                if self._speaks(batch):
                    self.cold.add(batch.writer)
            case WorkerJoined():
                known = self.loads.workers.get(event.worker)
                if known is None or known.epoch < event.epoch:
                    self.index.drop_worker(event.worker)
                    self.index.add_worker(event.worker)
                    self.cold.discard(event.worker)
            case WorkerLeft():
                if self.loads.current(event.worker, event.epoch) is not None:
                    self.index.drop_worker(event.worker)
                    self.cold.discard(event.worker)
            case Shadowed():
                # What another policy would have done.
                pass
            case _:
                pass

    def _speaks(self, batch: Batch[Any]) -> bool:
        """Is it the present life of a worker? One that is ahead of it has joined, and the log lost that."""
        worker = self.loads.workers.get(batch.writer)
        if worker is not None and worker.epoch < batch.epoch:
            # Its chain may be whole: the fleet subject is quiet, so nothing there tells for a long time.
            self.cold.add(batch.writer)
        return worker is not None and worker.epoch == batch.epoch

    def digest(self, loads: Loads | None = None) -> str:
        """Hash of everything that a decision depends on: equal states, equal digest, on any machine.

        `loads`: take these for this state's own.
        """
        loads = self.loads if loads is None else loads
        facts = (
            self.position,
            self.index.digest(),
            self.index.rows,
            self.index.slots,
            self.index.blocks,
            sorted((key, sorted(copies.items())) for key, copies in self.index.copies.items()),
            sorted(self.cold),
            # All of it follows from the workers' requests.
            msgspec.structs.replace(loads, assumed=Assumed()),
        )
        return blake2b(_canonical.encode(facts), digest_size=16).hexdigest()

    def snapshot(self, loads: Any = None, made_ns: int = 0) -> Snapshot:
        """This state as a snapshot; it shares nothing with it. One pass over the table: 0.1 s for 10 M blocks.

        May run in a thread beside decisions, though not beside the fold: decisions change nothing but the loads,
        so those are then passed as plain types (`msgspec.to_builtins`), taken before.
        """
        arrays = self.index.packed()
        loads = msgspec.to_builtins(self.loads) if loads is None else loads
        digest = self.digest(msgspec.convert(loads, Loads))
        facts = {
            "rows": self.index.rows,
            "words": self.index.words,
            "tiers": self.index.tiers,
            "max_blocks": self.index.max_blocks,
            "refused": self.index.refused,
            "slots": dict(self.index.slots),
            "blocks": dict(self.index.blocks),
            "copies": [(list(key), list(copies.items())) for key, copies in self.index.copies.items()],
            "cold": sorted(self.cold),
            "loads": loads,
            "heads": msgspec.to_builtins(self.chains.heads),
            "whole": self.chains.whole,
            "since": self.since,
            "log": self.log,
        }
        return Snapshot(self.position, facts, arrays, digest, made_ns)

    @classmethod
    def restore(cls, snapshot: Snapshot) -> "RouterState":
        """The state that `snapshot` was made from. Raises ValueError or LookupError if it is none of ours."""
        state = cls()
        facts = snapshot.facts
        state.position = snapshot.position
        state.index = PrefixIndex(facts.get("max_blocks", MAX_BLOCKS))
        state.index.refused = facts.get("refused", 0)
        state.index.slots = dict(facts["slots"])
        state.index.blocks = dict(facts["blocks"])
        state.index.copies = {(key[0], key[1]): dict(copies) for key, copies in facts["copies"]}
        state.index.adopt(snapshot.arrays, facts["rows"], facts["words"], facts["tiers"])
        state.cold = set(facts["cold"])
        state.loads = msgspec.convert(facts["loads"], Loads)
        state.log = facts.get("log", "")
        heads = msgspec.convert(facts.get("heads", {}), dict[str, Head])
        state.chains = Chains(heads, whole=facts.get("whole", False))
        state.since = facts.get("since", 0 if state.chains.whole else -1)
        return state


def in_order(piece: Slice) -> list[Record | Unreadable]:
    """A slice's messages by position, the unreadable ones in their places."""
    if not piece.unreadable:
        return list(piece.records)
    return sorted([*piece.records, *piece.unreadable], key=lambda one: one.position)


def together(events: Sequence[LogEvent]) -> Sequence[LogEvent | StoredChains]:
    """The same events with each run of stored blocks of one tier as one."""
    if len(events) < 2 or not any(isinstance(event, BlocksStored) for event in events[:2]):
        return events
    found: list[LogEvent | StoredChains] = []
    for key, run in groupby(events, key=lambda event: event.tier if isinstance(event, BlocksStored) else -1):
        chains = list(run)
        found += [_joined(key, chains)] if key >= 0 and len(chains) > 1 else chains  # type: ignore[arg-type]
    return found


def _joined(tier: int, chains: list[BlocksStored]) -> StoredChains:
    return StoredChains(
        tier,
        np.array([chain.parent for chain in chains], np.uint64),
        np.array([len(chain.hashes) // HASH_BYTES for chain in chains], np.int64),
        unpack_hashes(b"".join([chain.hashes for chain in chains])),
    )


def apply_to_loads(loads: Loads, record: Record, event: Event | StoredChains) -> None:
    """The part of the fold that decisions change: fleet, load and routing events."""
    batch = record.batch
    match event:
        case StoredChains() | Shadowed():
            pass
        case LoadReported():
            loads.report(batch.writer, batch.epoch, event, batch.wall_ns)
        case RequestsHeld():
            loads.hold(batch.writer, batch.epoch, event)
        case Decision():
            loads.decide(event)
        case Shadowed():
            pass
        case DecisionVoided():
            loads.void(event)
        case WorkerJoined():
            loads.join(event, record.position)
        case WorkerChanged():
            loads.change(event)
        case WorkerDraining():
            loads.drain(event)
        case WorkerLeft():
            loads.leave(event)
        case _:
            pass
