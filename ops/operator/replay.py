"""`headwater replay`: fold a pool's log again, and with --verify make every decision again."""

from collections.abc import AsyncIterator

import msgspec

from headwater.events.ports import Log, LogError, Record, Slice
from headwater.events.snapshot_store import SnapshotStore, continues
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.process.text_table import table
from headwater.router.decision.decide import RECOMPUTABLE
from headwater.router.fold.state import RouterState, in_order
from headwater.router.replay import Difference, Recorded, Replay
from headwater.schemas.events.route import Decision, RouteRefused


async def replay(nats: NatsSettings, pool: str, *, verify: bool, bookmark: str = "") -> int:
    """Fold from the start of the log, or from the oldest snapshot that it continues. 1 on a difference.

    With `bookmark`: from the snapshot of that name.
    """
    async with operator_ports(nats, "replay") as ports:
        pool = await choose_pool(ports, pool)
        log = await ports.pool_log(pool)
        snapshots = SnapshotStore(ports.blobs, pool)
        state = await _at(snapshots, bookmark, log) if bookmark else await first_state(snapshots, log)
        if state is None:
            return 1
        start = state.position
        decisions = await decisions_after(log, start)
        run = Replay(state, decisions)
        events = 0
        difference = run.start() if verify else None
        async for piece in pieces_after(log, start):
            if difference is not None:
                break
            for message in in_order(piece):
                events += len(message.batch.events) if isinstance(message, Record) else 0
                difference = run.step(message)
                if verify and difference is not None:
                    break
                difference = None
        if difference is not None:
            print(_explain(difference))
            return 1
        for broken in run.breaks:
            print(f"position {broken.position} breaks the chain of {broken.subject}: {broken.reason}")
        print(
            f"pool {pool}: positions {start + 1} to {state.position}, {events} events, "
            f"{len(state.loads.workers)} workers, {state.index.rows} blocks, state {state.digest()}"
        )
        if verify:
            total = len(decisions)
            print(f"verified {run.verified} of {total} decisions: equal")
            if run.unverifiable:
                print(f"{run.unverifiable} could not be checked: decisions before them are not in this log")
            for version, count in sorted(run.other_algorithms.items()):
                print(
                    f"{count} cannot be recomputed: version {version} of the decision algorithm made them, and this release has "
                    f"{' and '.join(map(str, sorted(RECOMPUTABLE)))}; use the release that made them"
                )
            skipped = run.unverifiable + run.other_algorithms.total()
            return 0 if run.verified + skipped == total else 1
        return 0


async def first_state(snapshots: SnapshotStore, log: Log) -> RouterState | None:
    """The state from which most of the log can be folded; None, with a message, if the log's start is purged and none continues it."""
    bounds = await log.bounds()
    if bounds.first <= 1:
        return RouterState()
    oldest = await _oldest(snapshots, log)
    if oldest is None:
        print(f"positions 1 to {bounds.first - 1} are purged and no snapshot continues them")
    return oldest


async def _at(store: SnapshotStore, bookmark: str, log: Log) -> RouterState:
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


async def _oldest(store: SnapshotStore, log: Log) -> RouterState | None:
    """The oldest state that the log continues: the most to replay."""
    bounds, identity = await log.bounds(), await log.identity()
    for position in await store.positions():
        if continues(position, bounds):
            try:
                state = RouterState.restore(await store.at(position))
                if state.log in ("", identity):
                    return state
                print(f"the snapshot at position {position} is of another log that had this name before")
            except (LogError, LookupError, TypeError, ValueError) as error:
                print(f"the snapshot at position {position} is unreadable: {error}")
    return None


async def decisions_after(log: Log, after: int) -> list[Recorded]:
    """All decisions that the log stores after a position."""
    found: list[Recorded] = []
    async for piece in pieces_after(log, after):
        for record in piece.records:
            life = (record.batch.writer, record.batch.epoch)
            found += [Recorded(life, event) for event in record.batch.events if isinstance(event, Decision)]
    return found


async def pieces_after(log: Log, after: int) -> AsyncIterator[Slice]:
    """The log after a position; prints what is missing of it."""
    async for piece in log.read(after, follow=False):
        if piece.gap is not None:
            print(
                f"positions {piece.gap.first} to {piece.gap.last} are gone ({piece.gap.reason}): "
                "decisions made on them come out otherwise"
            )
        for unreadable in piece.unreadable:
            print(f"position {unreadable.position} is unreadable: {unreadable.reason}")
        yield piece


def _explain(difference: Difference) -> str:
    recorded, again = difference.recorded, difference.recomputed
    router, epoch = difference.incarnation
    head = (
        f"DIFFERENT: decision {recorded.number} of {router} (epoch {epoch}) for {recorded.request}, "
        f"made at position {recorded.position}"
    )
    if isinstance(again, str):
        return f"{head}\n  cannot be made again: {again}"
    if isinstance(again, RouteRefused):
        return f"{head}\n  recorded: worker {recorded.worker}\n  now: refused, {again.reason}"
    rows = [
        (name, getattr(recorded, name), getattr(again, name))
        for name in msgspec.structs.asdict(recorded)
        if getattr(recorded, name) != getattr(again, name) and name != "candidates"
    ]
    before = {candidate.worker: candidate for candidate in recorded.candidates}
    after = {candidate.worker: candidate for candidate in again.candidates}
    for worker in sorted(before.keys() | after.keys()):
        if before.get(worker) != after.get(worker):
            rows.append((worker, before.get(worker, "-"), after.get(worker, "-")))
    shown = [(name, _shown(then), _shown(now)) for name, then, now in rows]
    return f"{head}\n{table(('what', 'recorded', 'now'), shown)}"


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
