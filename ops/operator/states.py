"""States and decisions of a pool's log, for whoever folds it again."""

from collections.abc import AsyncIterator, Callable, Iterable

from headwater.events.ports import Log, LogError, Slice
from headwater.events.snapshot_store import SnapshotStore, continues
from headwater.ops.config.setting import ConfigError
from headwater.ops.operator.request_search import FULL
from headwater.router.fold.state import RouterState
from headwater.router.replay import Recorded
from headwater.schemas.events.route import Decision
from headwater.schemas.subjects import pool_kinds

Told = Callable[[str], None]
"""Called with what is wrong with a log or its snapshots."""


async def first_state(snapshots: SnapshotStore, log: Log) -> RouterState | None:
    """The state from which most of the log can be folded; None, with a message, if the log's start is purged and none continues it."""
    bounds = await log.bounds()
    if bounds.first <= 1:
        return RouterState()
    oldest = await usable_state(snapshots, log, await continued(snapshots, log))
    if oldest is None:
        print(f"positions 1 to {bounds.first - 1} are purged and no snapshot continues them")
    return oldest


async def newest_state(
    snapshots: SnapshotStore, log: Log, until: int = FULL, told: Told = print
) -> RouterState | None:
    """The newest state at or before a position that the log continues; None if there is none."""
    tried: set[int] = set()
    # Listed again after a failure: the snapshot may have been pruned for newer ones while it was read.
    while left := [one for one in await continued(snapshots, log, until) if one not in tried]:
        tried.add(left[-1])
        state = await usable_state(snapshots, log, left[-1:], told)
        if state is not None:
            return state
    return None


async def folded(log: Log, store: SnapshotStore) -> RouterState:
    """The state at the log's end."""
    state = await newest_state(store, log)
    if state is None:
        bounds = await log.bounds()
        state = RouterState(whole=bounds.first <= 1)
        if bounds.first > 1:
            print(
                f"positions 1 to {bounds.first - 1} are gone and no snapshot continues them: blocks are missing"
            )
    async for piece in log.read(state.position, follow=False):
        state.fold(piece)
    return state


async def continued(snapshots: SnapshotStore, log: Log, until: int = FULL) -> list[int]:
    """The positions of the snapshots that the log continues, up to a position; the oldest first."""
    bounds = await log.bounds()
    return [one for one in await snapshots.positions() if one <= until and continues(one, bounds)]


async def usable_state(
    snapshots: SnapshotStore, log: Log, positions: Iterable[int], told: Told = print
) -> RouterState | None:
    """The state of the first of these snapshots that can be read and is of this log; None if there is none."""
    identity = await log.identity()
    for position in positions:
        try:
            state = RouterState.restore(await snapshots.at(position))
        except (LogError, LookupError, TypeError, ValueError) as error:
            told(f"the snapshot at position {position} is unreadable: {error}")
            continue
        if state.log in ("", identity):
            return state
        told(f"the snapshot at position {position} is of another log that had this name before")
    return None


async def bookmarked_state(store: SnapshotStore, bookmark: str, log: Log) -> RouterState:
    """The state that a bookmark names. Raises `ConfigError` if the log does not continue it."""
    bounds = await log.bounds()
    position = (await store.bookmarks.all()).get(bookmark)
    if position is None:
        known = ", ".join(sorted(await store.bookmarks.all())) or "none"
        raise ConfigError(f"--from {bookmark}: no such bookmark; there are: {known}")
    if not continues(position, bounds):
        raise ConfigError(
            f"--from {bookmark}: it names position {position}, and the log holds {bounds.first} to {bounds.last}"
        )
    try:
        state = RouterState.restore(await store.at(position))
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"--from {bookmark}: the snapshot at {position} is unreadable: {error}") from error
    if state.log not in ("", await log.identity()):
        raise ConfigError(f"--from {bookmark}: it names a state of another log that had this name before")
    return state


async def decisions_after(log: Log, after: int, until: int = FULL) -> list[Recorded]:
    """All decisions that the log stores after a position, up to another."""
    found: list[Recorded] = []
    async for piece in log.scan(after, until, pool_kinds("route")):
        for record in piece.records:
            life = (record.batch.writer, record.batch.epoch)
            found += [Recorded(life, event) for event in record.batch.events if isinstance(event, Decision)]
    return found


async def pieces_after(log: Log, after: int, until: int = FULL) -> AsyncIterator[Slice]:
    """The log after a position, up to another; prints what is missing of it."""
    async for piece in log.read(after, follow=False):
        if piece.gap is not None and piece.gap.first > until:
            return
        if piece.records and piece.records[-1].position > until:
            piece = _cut(piece, until)
        if piece.gap is not None:
            print(
                f"positions {piece.gap.first} to {piece.gap.last} are gone ({piece.gap.reason}): "
                "decisions made on them come out otherwise"
            )
        for unreadable in piece.unreadable:
            print(f"position {unreadable.position} is unreadable: {unreadable.reason}")
        yield piece
        if piece.records and piece.records[-1].position >= until:
            return


def _cut(piece: Slice, until: int) -> Slice:
    """The part of a slice up to a position."""
    records = [one for one in piece.records if one.position <= until]
    unreadable = tuple([one for one in piece.unreadable if one.position <= until])
    return piece._replace(records=records, unreadable=unreadable)
