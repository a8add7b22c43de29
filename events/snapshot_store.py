"""Snapshots: a fold's state with its log position, in the object store, and when a new one is due.

A snapshot is a manifest and its chunks (see `events.snapshot_bytes`). The manifest is written last and deleted first,
so a snapshot is visible whole or not at all. The newest `KEEP` and those named by a bookmark are retained, and with
`ladder_bytes` older ones, the sparser the older they are: from them the state at any position is folded in little time. If one
fails verification the next older one is used; without any, the fold starts at the beginning of the log.

The server removes a log's oldest messages by age and by bytes, independently of snapshots. A fold can start only if the
message after the newest snapshot is still stored. So each router checks this regularly, and saves a snapshot long before
that message is removed.

By age the check is exact: it uses the age of that message. By bytes it is an estimate: the server reports only the bytes
of the whole log, so messages after the snapshot count as `HEAVY` times the mean message, but never as more than the
whole log. This works as long as a router runs: if none runs for longer than the log's maximum age, messages after the
last snapshot are removed, and `headwater streams` reports it.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from headwater.events.ports import Blobs, Bounds, LogError, LogRefused, Retention
from headwater.events.snapshot_bytes import (
    CHUNK_BYTES_MAX,
    ArrayEntry,
    Chunk,
    Manifest,
    Snapshot,
    SnapshotCache,
    UnreadableSnapshot,
    decode_manifest,
    encode_manifest,
    pieces,
    rooms,
)
from headwater.schemas import subjects
from headwater.schemas.clock import Clock


class _Bookmark(msgspec.Struct, frozen=True):
    position: int


class Bookmarks:
    """The bookmarks of one pool: one object each, so that concurrent changes do not overwrite each other."""

    def __init__(self, blobs: Blobs, pool: str) -> None:
        self._blobs = blobs
        self._pool = pool

    async def all(self) -> dict[str, int]:
        """Position by name. Raises `LogError`: without all of them, no snapshot may be deleted."""
        positions: dict[str, int] = {}
        for name in await self._blobs.names(subjects.bookmark_prefix(self._pool)):
            data = await self._blobs.get(name)
            try:
                if data is not None:
                    positions[name.rsplit("/", 1)[1]] = msgspec.json.decode(data, type=_Bookmark).position
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise LogRefused(
                    f"object {name} is not a bookmark: {error}; delete it or set it again"
                ) from error
        return positions

    async def put(self, name: str, position: int) -> None:
        """Name a position. Raises `InvalidName`."""
        data = msgspec.json.encode(_Bookmark(position))
        await self._blobs.put(subjects.bookmark_name(self._pool, name), data)

    async def drop(self, name: str) -> bool:
        """Remove a name; False if there was none. The snapshot is pruned when the next one is saved."""
        existed = await self._blobs.get(subjects.bookmark_name(self._pool, name)) is not None
        await self._blobs.delete(subjects.bookmark_name(self._pool, name))
        return existed


KEEP = 2

LADDER_BYTES = 256 * 1024 * 1024
"""Bytes of a pool's older snapshots that its routers keep."""

LADDER_MAX = 256
"""And their number."""

NEAR_RECORDS = 5_000
"""A cached snapshot at most this much older is preferred: folding the difference is faster than fetching."""

READS = 3
"""Chunks read concurrently: one is hashed while the next ones arrive."""

_log = structlog.get_logger("headwater.snapshots")


class Kept(NamedTuple):
    """A snapshot in the store. `size` in bytes. `manifest` is None, and `problem` says why, if unreadable."""

    position: int
    size: int
    manifest: Manifest | None
    problem: str = ""


def continues(position: int, bounds: Bounds) -> bool:
    """Can a fold at `position` continue: are all messages after it in the log, and it not beyond the log's end?"""
    return bounds.first - 1 <= position <= bounds.last


class SnapshotStore:
    """Writes and finds the snapshots of one pool in the object store.

    `cache`: the local cache of the newest one's arrays. `ids` generates names for attempts to save. `prepare` may
    replace arrays, before they are read, by others of the same type and shape whose memory suits the reader. `ladder_bytes`: how many
    bytes of older snapshots `prune` leaves.
    """

    def __init__(
        self,
        blobs: Blobs,
        pool: str,
        *,
        cache: SnapshotCache | None = None,
        ids: Callable[[], str] = lambda: secrets.token_hex(8),
        prepare: Callable[[dict[str, NDArray[Any]]], None] | None = None,
        chunk_bytes: int = CHUNK_BYTES_MAX,
        ladder_bytes: int = 0,
    ) -> None:
        self._blobs = blobs
        self._pool = pool
        self._cache = cache
        self._ids = ids
        self._prepare = prepare
        self._chunk_bytes = chunk_bytes
        self._ladder_bytes = ladder_bytes
        self._sizes: dict[int, int] = {}
        self.bookmarks = Bookmarks(blobs, pool)

    async def save(
        self, snapshot: Snapshot, log_bounds: Callable[[], Awaitable[Bounds]] | None = None
    ) -> Manifest:
        """Write the snapshot, then prune older ones; `log_bounds` as for `prune`.

        Raises `LogError` if it could not be written; then, and when cancelled before, the earlier snapshots are
        unchanged.
        """
        writing = self._ids()
        entries: list[ArrayEntry] = []
        bulk: list[memoryview] = []
        number = 0
        for name, array in snapshot.arrays.items():
            flat = np.ascontiguousarray(array).reshape(array.shape)
            chunks: list[Chunk] = []
            for piece in pieces(flat, self._chunk_bytes):
                chunk = subjects.snapshot_chunk(self._pool, snapshot.position, writing, number)
                chunks.append(Chunk(chunk, len(piece), await self._blobs.put(chunk, piece)))
                bulk.append(piece)
                number += 1
            entries.append(ArrayEntry(name, flat.dtype.str, flat.shape, tuple(chunks)))
        manifest = Manifest(
            snapshot.position, snapshot.facts, tuple(entries), snapshot.digest, snapshot.made_ns
        )
        await self._blobs.put(
            subjects.snapshot_name(self._pool, snapshot.position), encode_manifest(manifest)
        )
        if self._cache is not None:
            await asyncio.to_thread(self._cache.write, self._pool, manifest.key, bulk)
        try:
            await self.prune(log_bounds)
        except LogError as error:
            # The snapshot is saved; the next one prunes what this one could not.
            _log.warning("snapshots_not_pruned", reason=str(error))
        return manifest

    async def positions(self) -> list[int]:
        """Positions of all snapshots, sorted."""
        names = await self._blobs.names(subjects.snapshot_prefix(self._pool))
        numbers = [name.rsplit("/", 1)[1] for name in names]
        return sorted(int(number) for number in numbers if number.isdecimal())

    async def newest(self, accept: Callable[[int], bool]) -> Snapshot | None:
        """The newest readable snapshot whose position passes `accept`, None if there is none.

        A cached one is preferred to one that is newer by no more than `NEAR_RECORDS`.
        """
        tried: set[int] = set()
        while True:
            # Listed again after a failure: the snapshot may have been pruned for newer ones while it was read.
            untried = [p for p in await self.positions() if p not in tried and accept(p)]
            if not untried:
                return None
            for position in await self._order(untried):
                tried.add(position)
                try:
                    return await self.at(position)
                except (UnreadableSnapshot, LogError) as error:
                    name = subjects.snapshot_name(self._pool, position)
                    _log.error("snapshot_unreadable", name=name, reason=str(error))

    async def at(self, position: int) -> Snapshot:
        """The snapshot at `position`. Raises `UnreadableSnapshot` with the reason, or `LogError`."""
        data = await self._blobs.get(subjects.snapshot_name(self._pool, position))
        if data is None:
            raise UnreadableSnapshot(f"there is no snapshot at position {position}")
        manifest = decode_manifest(data)
        if manifest.position != position:
            raise UnreadableSnapshot(f"its manifest has position {manifest.position}")
        arrays = {entry.name: entry.allocate() for entry in manifest.arrays}
        if self._prepare is not None:
            self._prepare(arrays)
        into = rooms(manifest, arrays)
        if not await self._from_cache(manifest, into):
            await self._from_store(manifest, into)
        return Snapshot(manifest.position, manifest.facts, arrays, manifest.digest, manifest.made_ns)

    async def listing(self) -> list[Kept]:
        """All snapshots by position, without reading their chunks."""
        snapshots: list[Kept] = []
        for position in await self.positions():
            try:
                data = await self._blobs.get(subjects.snapshot_name(self._pool, position))
                if data is None:
                    continue
                manifest = decode_manifest(data)
                size = len(data) + sum(chunk.size for chunk in manifest.chunks)
                snapshots.append(Kept(position, size, manifest))
            except (UnreadableSnapshot, LogError) as error:
                snapshots.append(Kept(position, 0, None, str(error)))
        return snapshots

    async def prune(self, log_bounds: Callable[[], Awaitable[Bounds]] | None = None) -> None:
        """Delete all but the newest `KEEP`, the ladder and those with a bookmark, and chunks of incomplete attempts.

        A snapshot beyond the log's last position belongs to an earlier log of the same name, and would otherwise count as newer
        than all snapshots of this one. Those that the log does not continue any more are of no use to a ladder.
        """
        positions = await self.positions()
        chunks = await self._blobs.names(subjects.snapshot_chunk_prefix(self._pool))
        # Read after the listings: what another router wrote until then is not beyond it.
        bounds = Bounds(1, max([0, *positions])) if log_bounds is None else await log_bounds()
        last = bounds.last
        own_positions = [position for position in positions if position <= last]
        rungs = await self._ladder([position for position in own_positions if continues(position, bounds)])
        # Read last, so that a bookmark set during the listings is included.
        keep = {*own_positions[-KEEP:], *rungs, *(await self.bookmarks.all()).values()}
        for position in positions:
            if position not in keep:
                await self._blobs.delete(subjects.snapshot_name(self._pool, position))
        oldest = min(own_positions[-KEEP:], default=0)
        for name in chunks:
            number = name.split("/")[2]
            if not number.isdecimal():
                continue
            position = int(number)
            # Newer ones without a manifest are being saved by another router.
            foreign = log_bounds is not None and position > last
            if position not in keep and (position < oldest or foreign):
                await self._blobs.delete(name)

    async def _ladder(self, positions: list[int]) -> list[int]:
        """Those of a log's snapshots that stay as its ladder."""
        if not self._ladder_bytes:
            return []
        self._sizes = {position: size for position, size in self._sizes.items() if position in set(positions)}
        for position in positions:
            if position not in self._sizes:
                data = await self._blobs.get(subjects.snapshot_name(self._pool, position))
                try:
                    chunks = decode_manifest(data).chunks if data is not None else ()
                except UnreadableSnapshot:
                    continue
                self._sizes[position] = len(data or b"") + sum(chunk.size for chunk in chunks)
        return thin_out(self._sizes, self._ladder_bytes)

    async def _order(self, positions: list[int]) -> list[int]:
        """Newest first, but the cached one before those that are only slightly newer."""
        order = sorted(positions, reverse=True)
        if self._cache is None:
            return order
        for position in order:
            if order[0] - position > NEAR_RECORDS:
                break
            try:
                data = await self._blobs.get(subjects.snapshot_name(self._pool, position))
                key = decode_manifest(data).key if data is not None else ""
            except (UnreadableSnapshot, LogError):
                continue
            # The first bytes of a file: too little for a thread.
            if key and self._cache.holds(self._pool, key):
                return [position, *(other for other in order if other != position)]
        return order

    async def _from_cache(self, manifest: Manifest, into: list[memoryview]) -> bool:
        if self._cache is None:
            return False
        return await asyncio.to_thread(self._cache.read, self._pool, manifest.key, manifest.chunks, into)

    async def _from_store(self, manifest: Manifest, into: list[memoryview]) -> None:
        """Read every chunk, several concurrently. The first failure cancels the others."""
        turn = asyncio.Semaphore(READS)

        async def read(chunk: Chunk, room: memoryview) -> None:
            async with turn:
                if not await self._blobs.read_into(chunk.name, room, chunk.digest):
                    raise UnreadableSnapshot(
                        f"its chunk {chunk.name} is missing; the next snapshot replaces it"
                    )

        try:
            async with asyncio.TaskGroup() as tasks:
                for chunk, room in zip(manifest.chunks, into, strict=True):
                    tasks.create_task(read(chunk, room))
        except* (UnreadableSnapshot, LogError) as failures:
            first = failures.exceptions[0]
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            failure: Exception = first
        else:
            return
        raise failure


def thin_out(sizes: Mapping[int, int], budget: int) -> list[int]:
    """Of snapshots at some positions, with their sizes, those that fit into a budget of bytes, sorted.

    The first and the newest `KEEP` stay. Of the others that one goes first whose neighbours would be closest to each other relative
    to its distance from the newest: so the gaps grow in proportion to age, and each call goes on where the last one stopped.
    """
    positions = sorted(sizes)
    total = sum(sizes.values())
    while (total > budget or len(positions) > LADDER_MAX) and len(positions) > KEEP + 1:
        newest = positions[-1]
        at = min(
            range(1, len(positions) - KEEP),
            key=lambda at: (positions[at + 1] - positions[at - 1]) / (newest - positions[at] + 1),
            default=0,
        )
        total -= sizes[positions.pop(at)]
    return positions


# The guard of retention: a snapshot is due before messages that the newest one needs are removed.

MARGIN = 0.5
"""A snapshot is due once messages after the newest one use this share of a limit."""

HEAVY = 4
CHECK_PERIOD_S = 5.0

_retention_log = structlog.get_logger("headwater.retention")


def snapshot_due(held: Retention, saved: int) -> str:
    """Why a snapshot must be saved now, with the newest one at position `saved`; empty if none is due.

    `held` is the retention with `after=saved`. Without messages after the snapshot, none can be lost.
    """
    later = held.last - saved
    if later <= 0:
        return ""
    if held.first > saved + 1:
        return f"the log starts at {held.first}, after position {saved} + 1 of the newest snapshot"
    if held.max_age_s and held.next_age_s >= MARGIN * held.max_age_s:
        return f"position {saved + 1} is {held.next_age_s:.0f} s old of {held.max_age_s:.0f} s"
    if held.max_messages and later >= MARGIN * held.max_messages:
        return f"{later} messages after the newest snapshot, of {held.max_messages}"
    if held.max_bytes:
        mean = held.bytes / (held.last - held.first + 1)
        weight = min(held.bytes, HEAVY * mean * later)
        if weight >= MARGIN * held.max_bytes:
            return f"up to {weight:.0f} bytes after the newest snapshot, of {held.max_bytes}"
    return ""


def forgotten(first: int, last: int, saved: int) -> str:
    """Why a fold cannot continue from its newest snapshot (0: none); empty if it can."""
    if first > saved + 1:
        newest = f"the newest snapshot is at {saved}" if saved else "there is no snapshot"
        return f"the log starts at {first} and {newest}"
    if saved > last:
        return f"the newest snapshot is at {saved} and the log ends at {last}: it was replaced"
    return ""


class Retained(Protocol):
    """The part of `Log` that this module uses."""

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`."""
        ...


class RetentionGuard:
    """Checks a log's retention at most every `CHECK_PERIOD_S`."""

    def __init__(self, log: Retained, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._checked_at_s = float("-inf")

    async def due(self, saved: int) -> str:
        """See `snapshot_due`. Empty while the log is unavailable: then no snapshot can be saved either."""
        now = self._clock.monotonic_s()
        if now - self._checked_at_s < CHECK_PERIOD_S:
            return ""
        self._checked_at_s = now
        try:
            reason = snapshot_due(await self._log.retention(saved), saved)
        except LogError as error:
            _retention_log.warning("retention_unknown", reason=str(error))
            return ""
        if reason:
            _retention_log.info("snapshot_due", saved_position=saved, reason=reason)
        return reason


# The policy: a snapshot is due by the time to fold the tail after it, by age, and by its cost.


class Policy(NamedTuple):
    """Bounds; each alone makes a snapshot due. Seconds are of the actor's clock.

    `fold_s`: how long a restart may take to fold the tail. `records`: messages in the tail, for a log that is
    slow to read rather than to fold. `age_s`: age of the newest snapshot, if anything changed since. `share`: at most
    this fraction of the time is spent on taking snapshots, so that a large state is not written continuously.
    """

    fold_s: float = 1.0
    records: int = 20_000
    age_s: float = 30.0
    share: float = 0.05


class Tail(NamedTuple):
    """What was folded since the last snapshot (or since the start), and how long that took.

    `cost_s`: duration of taking the last snapshot, 0 without one.
    """

    records: int
    fold_s: float
    age_s: float
    cost_s: float = 0.0


def due(policy: Policy, tail: Tail) -> bool:
    """Should a snapshot be taken now?"""
    if tail.records <= 0 or tail.age_s < tail.cost_s / policy.share:
        return False
    return tail.fold_s >= policy.fold_s or tail.records >= policy.records or tail.age_s >= policy.age_s


__all__ = [
    "KEEP",
    "LADDER_BYTES",
    "NEAR_RECORDS",
    "Kept",
    "Snapshot",
    "SnapshotStore",
    "UnreadableSnapshot",
    "continues",
]
