"""Places in a pool's log as an operator names them, and the folded state there; and both logs as they grow.

1234                    a position
-5m                     a time before now: s, m, h or d
2026-11-26T21:05:00     a time, in UTC unless it has an offset; 21:05 is today's
incident                a bookmark of `headwater snapshots`
start, end              the first and the last position of the log
"""

import asyncio
import sys
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Bounds, Log, LogError, Record, Slice, Unreadable
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.capture_ports import CapturedLog
from headwater.ops.operator.log_reading import continued, newest_state
from headwater.ops.terminal import Progress, time_ns
from headwater.router.state import RouterState, in_order

Message = Record | Unreadable
ItemT = TypeVar("ItemT")

NOTATION: Final = "a position (1234), a time before now (-5m), a time (2026-11-26T21:05:00, in UTC), a bookmark, start or end"


class PoolLog(NamedTuple):
    """The log of a pool, with what is needed to name places in it and to fold it.

    `now_ns` is the time that times before now count from: of a capture that of its last message.
    """

    log: Log
    store: SnapshotStore
    now_ns: Callable[[], int]


async def open_log(ports: Ports, pool: str) -> PoolLog:
    """The log of a pool that is there."""
    log, store = await ports.pool_log(pool), SnapshotStore(ports.blobs, pool)
    if not isinstance(log, CapturedLog):
        return PoolLog(log, store, ports.clock.wall_ns)
    ends = [await stored_at(source, (await source.bounds()).last) for source in (log, ports.requests)]
    return PoolLog(log, store, lambda: max(ends))


async def find_position(text: str, pool: PoolLog, argument: str) -> int:
    """The last position at a place; `argument` names the argument in errors. Raises `ConfigError`."""
    bounds = await pool.log.bounds()
    if text in ("start", "end"):
        return bounds.first if text == "start" else bounds.last
    if text.isdecimal():
        return _within(int(text), bounds, f"{argument} {text}")
    wall_ns = time_ns(text, pool.now_ns())
    if wall_ns is not None:
        return await pool.log.position_at(wall_ns)
    bookmarks = await pool.store.bookmarks.all()
    if text in bookmarks:
        return _within(bookmarks[text], bounds, f"{argument} {text} (position {bookmarks[text]})")
    raise ConfigError(f"{argument} {text}: expected {NOTATION}")


def _within(position: int, bounds: Bounds, label: str) -> int:
    if bounds.first - 1 <= position <= bounds.last:
        return position
    raise ConfigError(f"{label}: the log holds positions {bounds.first} to {bounds.last}")


async def scan_each(
    log: Log, after: int, until: int, subjects: Sequence[str]
) -> AsyncIterator[Sequence[Message]]:
    """Runs of the messages of some subjects in order, each subject by a scan of its own.

    The server filters by one subject at little cost; a scan of several would receive all messages.
    """
    streams = [log.scan(after, until, (subject,)) for subject in subjects]
    pending = [(run, stream) for stream in streams if (run := await _next_run(stream))]
    while pending:
        pending.sort(key=lambda entry: entry[0][0].position)
        (run, stream), others = pending[0], pending[1:]
        before = others[0][0][0].position if others else until + 1
        end = bisect_left(run, before, key=lambda message: message.position)
        yield run[:end]
        rest = run[end:] or await _next_run(stream)
        pending = [(rest, stream), *others] if rest else others


async def _next_run(pieces: AsyncIterator[Slice]) -> Sequence[Message]:
    """The next messages; empty at the end."""
    async for piece in pieces:
        if run := in_order(piece):
            return run
    return ()


async def merged(
    streams: Iterable[AsyncIterator[ItemT]], order: Callable[[ItemT], Any]
) -> AsyncGenerator[ItemT, None]:
    """What several streams have, each of them in order, in the order of all."""
    left = [(head, stream) for stream in streams if (head := await anext(stream, None)) is not None]
    while left:
        left.sort(key=lambda one: order(one[0]))
        head, stream = left.pop(0)
        yield head
        if (following := await anext(stream, None)) is not None:
            left.append((following, stream))


async def stored_at(log: Log, position: int) -> int:
    """When the message at a position was stored, in nanoseconds; 0 if it is gone or unreadable."""
    async for piece in log.scan(position - 1, position):
        for record in piece.records:
            return record.stored_ns
    return 0


async def state_at(pool: PoolLog, position: int) -> RouterState:
    """The state folded up to a position: from the newest snapshot before it, and the log from there.

    What is missing for that is printed on standard error.
    """
    state = await nearest_state(pool, position)
    start = state.position
    with Progress("folding the log") as progress:
        async for piece in pool.log.scan(state.position, position):
            state.fold(piece)
            progress.at(state.position - start, position - start)
            await asyncio.sleep(0)
    return state


async def earliest(pool: PoolLog) -> int:
    """The first position at which the whole state is known: before the first message, or that of the oldest snapshot."""
    bounds = await pool.log.bounds()
    if bounds.first <= 1:
        return 0
    return min(await continued(pool.store, pool.log), default=bounds.first - 1)


async def nearest_state(pool: PoolLog, position: int) -> RouterState:
    """The state of the newest snapshot at a position or before it; an empty one where there is none."""
    state = await newest_state(pool.store, pool.log, position, lambda text: print(text, file=sys.stderr))
    if state is not None:
        return state
    bounds = await pool.log.bounds()
    if bounds.first > 1:
        gone = f"positions 1 to {bounds.first - 1} are gone and no snapshot continues them"
        print(f"{gone}: what they changed is missing", file=sys.stderr)
    state = RouterState(whole=bounds.first <= 1)
    state.position = bounds.first - 1
    return state


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these until the block ends. Raises the `LogError` that ends one of them as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as failed:
        error = _first(failed)
        if error is None:
            raise
        raise error from failed


def _first(failed: BaseExceptionGroup[BaseException]) -> LogError | None:
    for inner in failed.exceptions:
        cause = _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
        if isinstance(cause, LogError):
            return cause
    return None


async def follow(log: Log, after: int, apply: Callable[[Slice], None]) -> None:
    """Give every slice after a position to `apply`. Does not return."""
    async for piece in log.read(after, follow=True):
        apply(piece)
