"""The router's state: a fold of the pool log. `apply` is total and deterministic, and has no side effects.

There is no clock, randomness, I/O or logging here. An event that does not fit (an unknown worker, an ended epoch) changes nothing, so
folding never fails.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headwater.events.chain import Break, Chains, Head
from headwater.events.ports import Record, Slice, Unreadable
from headwater.events.snapshot_store import Snapshot
from headwater.router.index.prefix_index import MAX_BLOCKS, PrefixIndex
from headwater.router.load import Loads
from headwater.router.worker import Credit
from headwater.schemas.encoding import Batch, LogEvent
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EnginesWeighted,
    Event,
    KvGap,
    LoadReported,
    RequestsHeld,
    TrafficSplit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.hashing import HASH_BYTES, U64, unpack_hashes
from headwater.schemas.routing import Decision, DecisionVoided
from headwater.schemas.subjects import writer_of

STATE_VERSION: Final = 2
"""Version of what the fold makes of the log. Increase it when the fold learns to read something that earlier releases left out of their
snapshots, and let `complete` add it to those. Version 1 knew neither revisions nor traffic splits."""

_canonical = msgspec.msgpack.Encoder(order="deterministic")


class StoredChains(NamedTuple):
    """Consecutive store events as one: chain i is the next `lengths[i]` hashes."""

    tier: int
    parents: U64
    lengths: NDArray[np.int64]
    hashes: U64


class RouterState:
    """Index, loads, and the log position up to which they are folded.

    `cold` lists workers with missing KV events: their cache is ignored until they reannounce it. `log` is the identity of
    the log that `position` is in. `whole` is False for a fold that does not start at the log's first message; `since` is then
    its first position, or -1 if unknown. It is 0 for a whole fold. `version` is the `STATE_VERSION` of the release that made the
    snapshot which the fold continues.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self.position = 0
        self.log = ""
        self.chains = Chains(whole=whole)
        self.since = 0 if whole else -1
        self.index = PrefixIndex()
        self.loads = Loads()
        self.cold: set[str] = set()
        self.version = STATE_VERSION

    def apply(self, record: Record) -> Break | None:
        """Fold one log message; returns the break in its chain, if any."""
        events, broken = self.admit(record)
        for event in events:
            self.apply_to_index(record.batch, event)
            apply_to_loads(self.loads, record, event)
        return broken

    def admit(self, record: Record) -> tuple[Sequence[LogEvent | StoredChains], Break | None]:
        """Advance to a message: returns its events, which the caller folds, and the break in its chain, if any.

        A worker with a missing message is cold from here on. Consecutive store events are merged: folding them together
        is several times faster.
        """
        fold, broken = self.chains.follow(record)
        if broken is not None:
            self._mark_cold(broken.writer)
        self.position = record.position
        return (merge_stored(record.batch.events) if fold else ()), broken

    def skip(self, unreadable: Unreadable) -> None:
        """Advance past an unreadable message: its events are lost."""
        self._mark_cold(writer_of(unreadable.subject))
        self.position = unreadable.position

    def _mark_cold(self, writer: str) -> None:
        if writer in self.loads.workers:
            self.cold.add(writer)

    def take(self, message: Record | Unreadable) -> None:
        """Fold one message, whether or not it can be read."""
        if isinstance(message, Unreadable):
            self.skip(message)
        else:
            self.apply(message)

    def fold(self, piece: Slice) -> None:
        """Fold the messages of a slice, in their order."""
        for message in in_order(piece):
            self.take(message)

    def apply_to_index(self, batch: Batch[Any], event: Event | StoredChains) -> None:
        """The part of the fold that does not depend on decisions. Call before `apply_to_loads`."""
        on_index = _ON_INDEX.get(type(event))
        if on_index is not None:
            on_index(self, batch, event)

    def _store_chains(self, batch: Batch[Any], event: StoredChains) -> None:
        if self._is_current(batch):
            self.index.store_chains(batch.writer, event.tier, event.parents, event.lengths, event.hashes)

    def _store(self, batch: Batch[Any], event: BlocksStored) -> None:
        if self._is_current(batch):
            self.index.store(batch.writer, event.tier, event.parent, unpack_hashes(event.hashes))

    def _remove(self, batch: Batch[Any], event: BlocksRemoved) -> None:
        if self._is_current(batch):
            self.index.remove(batch.writer, event.tier, unpack_hashes(event.hashes))

    def _clear(self, batch: Batch[Any], event: BlocksCleared) -> None:
        if self._is_current(batch):
            self.index.clear(batch.writer)
            self.cold.discard(batch.writer)

    def _miss(self, batch: Batch[Any], event: KvGap) -> None:
        if self._is_current(batch):
            self.cold.add(batch.writer)

    def _join(self, batch: Batch[Any], event: WorkerJoined) -> None:
        present = self.loads.workers.get(event.worker)
        if present is None or present.epoch < event.epoch:
            self.index.drop_worker(event.worker)
            self.index.add_worker(event.worker)
            self.cold.discard(event.worker)

    def _leave(self, batch: Batch[Any], event: WorkerLeft) -> None:
        if self.loads.current(event.worker, event.epoch) is not None:
            self.index.drop_worker(event.worker)
            self.cold.discard(event.worker)

    def _is_current(self, batch: Batch[Any]) -> bool:
        """Was the batch written by a worker's present incarnation? If by a later one, the log lost its joining."""
        worker = self.loads.workers.get(batch.writer)
        if worker is not None and worker.epoch < batch.epoch:
            # Its chain may look complete: the fleet subject is quiet, so a gap there shows only much later.
            self.cold.add(batch.writer)
        return worker is not None and worker.epoch == batch.epoch

    def digest(self, loads: Loads | None = None) -> str:
        """Hash of everything that a decision depends on: equal states have equal digests, on any machine.

        `loads` replaces the state's own.
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
            # Credit follows from the workers' requests.
            msgspec.structs.replace(loads, credit=Credit()),
        )
        return blake2b(_canonical.encode(facts), digest_size=16).hexdigest()

    def snapshot(self, loads: Any = None, made_ns: int = 0) -> Snapshot:
        """A snapshot of this state, which shares no memory with it. One pass over the index: 0.1 s for 10 M blocks.

        May run in a thread while decisions are made, but not while the log is folded. Decisions change the loads
        only, so pass a copy of those as plain types (`msgspec.to_builtins`).
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
            "version": STATE_VERSION,
        }
        return Snapshot(self.position, facts, arrays, digest, made_ns)

    @classmethod
    def restore(cls, snapshot: Snapshot) -> "RouterState":
        """The state that `snapshot` was taken of. Raises ValueError or LookupError if the snapshot is malformed."""
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
        state.version = facts.get("version", 1)
        return state

    def complete(self, record: Record) -> None:
        """Add what an earlier release's fold left out of a fleet message up to this position, in the log's order."""
        for event in record.batch.events:
            if isinstance(event, WorkerJoined):
                worker = self.loads.current(event.worker, event.epoch)
                if worker is not None:
                    worker.revision = event.revision
            elif isinstance(event, TrafficSplit):
                self.loads.split(event, record.position, record.stored_ns)


def in_order(piece: Slice) -> list[Record | Unreadable]:
    """A slice's messages by position, unreadable ones included."""
    if not piece.unreadable:
        return list(piece.records)
    return sorted([*piece.records, *piece.unreadable], key=lambda message: message.position)


def merge_stored(events: Sequence[LogEvent]) -> Sequence[LogEvent | StoredChains]:
    """The events, with each run of store events of one tier merged into one."""
    if len(events) < 2 or not (type(events[0]) is BlocksStored or type(events[1]) is BlocksStored):
        return events
    merged: list[LogEvent | StoredChains] = []
    run: list[BlocksStored] = []
    for event in events:
        if type(event) is BlocksStored:
            if run and event.tier != run[0].tier:
                merged.append(_joined(run))
                run = []
            run.append(event)
        else:
            if run:
                merged.append(_joined(run))
                run = []
            merged.append(event)
    if run:
        merged.append(_joined(run))
    return merged


def _joined(chains: list[BlocksStored]) -> BlocksStored | StoredChains:
    """Consecutive store events of one tier."""
    if len(chains) == 1:
        return chains[0]
    return StoredChains(
        chains[0].tier,
        np.array([chain.parent for chain in chains], np.uint64),
        np.array([len(chain.hashes) // HASH_BYTES for chain in chains], np.int64),
        unpack_hashes(b"".join([chain.hashes for chain in chains])),
    )


def apply_to_loads(loads: Loads, record: Record, event: Event | StoredChains) -> None:
    """The part of the fold that decisions affect: fleet, load and routing events."""
    on_loads = _ON_LOADS.get(type(event))
    if on_loads is not None:
        on_loads(loads, record, event)


def is_on_loads(event: Event | StoredChains) -> bool:
    """Can the event change loads at all?"""
    return type(event) in _ON_LOADS


def _report(loads: Loads, record: Record, event: LoadReported) -> None:
    batch = record.batch
    loads.report(batch.writer, batch.epoch, event, batch.wall_ns, record.stored_ns)


def _hold(loads: Loads, record: Record, event: RequestsHeld) -> None:
    loads.hold(record.batch.writer, record.batch.epoch, event)


def _weigh(loads: Loads, record: Record, event: EnginesWeighted) -> None:
    loads.engine_weights = dict(event.weights)


# By type: most events concern one part only, and one lookup is faster than a comparison with each type.

_ON_INDEX: Final[dict[type, Callable[[RouterState, Batch[Any], Any], None]]] = {
    StoredChains: RouterState._store_chains,
    BlocksStored: RouterState._store,
    BlocksRemoved: RouterState._remove,
    BlocksCleared: RouterState._clear,
    KvGap: RouterState._miss,
    WorkerJoined: RouterState._join,
    WorkerLeft: RouterState._leave,
}

_ON_LOADS: Final[dict[type, Callable[[Loads, Record, Any], object]]] = {
    LoadReported: _report,
    RequestsHeld: _hold,
    Decision: lambda loads, record, event: loads.decide(event),
    DecisionVoided: lambda loads, record, event: loads.void(event),
    WorkerJoined: lambda loads, record, event: loads.join(event, record.position),
    WorkerChanged: lambda loads, record, event: loads.change(event),
    WorkerDraining: lambda loads, record, event: loads.drain(event),
    WorkerLeft: lambda loads, record, event: loads.leave(event),
    EnginesWeighted: _weigh,
    TrafficSplit: lambda loads, record, event: loads.split(event, record.position, record.stored_ns),
}
