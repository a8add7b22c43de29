"""What commands read of a pool's logs: states and decisions for whoever folds the log again, and all that the logs have of one request.

A request is found without reading all of them. Its id has the time at which its edge made it, and positions have the time at which the server
stored them. So the request log is read from a little before that time until the request has ended, and then the pool's log over the same
time. Clocks differ, and an append may be late: where something is missing the search is repeated with more time around it, and at last over
the whole log. A message that does not contain the id's bytes is not decoded.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from headwater.events.ports import Log, LogError, Slice, StoredMessage
from headwater.events.snapshot_store import SnapshotStore, continues
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.requests import decisions_in
from headwater.ops.terminal import Progress
from headwater.router.replay import Reconstruction, Recorded
from headwater.router.state import RouterState, in_order
from headwater.schemas.encoding import Batch, LogEvent, UnreadableBatch, decode_batch
from headwater.schemas.events import Event, RequestEnded, RequestRouted
from headwater.schemas.names import SECOND_NS, time_of
from headwater.schemas.routing import Decision
from headwater.schemas.subjects import pool_kinds

MARGINS_S: Final = (2, 120)
"""How far the clocks of an edge and of the log's server may differ: tried one after the other."""

BEFORE_NS: Final = 2 * SECOND_NS
AFTER_NS: Final = 3 * SECOND_NS
"""What is read of the pool's log around a request: an append may be late, and workers and shadows write after its end."""

FULL: Final = 1 << 62
"""Later than any position, and any time in nanoseconds."""

Told = Callable[[int, int], None]
"""Called with (positions read, of how many)."""


class LifeEvent(NamedTuple):
    """An event of a request in the request log."""

    position: int
    stored_ns: int
    edge: str
    event: Event


class Window(NamedTuple):
    """Positions after `after`, up to `until`."""

    after: int = 0
    until: int = FULL


WHOLE: Final = Window()


ID_FORM: Final = "ids look like chatcmpl-… (header x-request-id)"


def check_id(request: str) -> None:
    """Raises `ConfigError` if no request is named."""
    if not request.strip():
        raise ConfigError("REQUEST is empty: give a request id, as in the header x-request-id")


def untold(done: int, total: int) -> None:
    """Tell nobody."""


async def batches_with(
    log: Log, text: str, window: Window, subjects: Sequence[str] = (), report: Told = untold
) -> AsyncGenerator[tuple[StoredMessage, Batch[LogEvent]], None]:
    """The readable batches whose bytes contain `text`."""
    needle = text.encode()
    bounds = await log.bounds()
    first, last = max(window.after, bounds.first - 1), min(window.until, bounds.last)
    async with aclosing(_messages(log, window, subjects)) as runs:
        async for run in runs:
            report(run[-1].position - first, last - first)
            for message in run:
                if needle in message.data:
                    try:
                        yield message, decode_batch(message.data)
                    except UnreadableBatch:
                        continue


async def _messages(
    log: Log, window: Window, subjects: Sequence[str]
) -> AsyncGenerator[list[StoredMessage], None]:
    async for run in log.scan_raw(window.after, window.until, subjects):
        if run:
            yield run


async def find_life(log: Log, request: str, now_ns: int, report: Told = untold) -> list[LifeEvent]:
    """The events of a request in the request log, up to its end; none if there are none."""
    made_ns = time_of(request, now_ns)
    for margin_s in MARGINS_S:
        if made_ns is None:
            break
        after = await log.position_at(made_ns - margin_s * SECOND_NS)
        latest_ns = made_ns + (margin_s + 1) * SECOND_NS
        life = await _life_after(log, request, Window(after, FULL), latest_ns, report)
        if life:
            return life
    return await _life_after(log, request, WHOLE, FULL, report)


async def _life_after(
    log: Log, request: str, window: Window, latest_ns: int, report: Told
) -> list[LifeEvent]:
    """Its events from there on to its end; none if none was stored until `latest_ns`."""
    events: list[LifeEvent] = []
    needle = request.encode()
    bounds = await log.bounds()
    first, last = max(bounds.first - 1, window.after), bounds.last
    async with aclosing(_messages(log, window, ())) as runs:
        async for run in runs:
            report(run[-1].position - first, last - first)
            for message in run:
                if needle in message.data:
                    events += _events_of(message, request)
            if events and isinstance(events[-1].event, RequestEnded):
                return events
            if not events and run[-1].stored_ns > latest_ns:
                return []
    return events


def _events_of(message: StoredMessage, request: str) -> Iterable[LifeEvent]:
    try:
        batch = decode_batch(message.data)
    except UnreadableBatch:
        return
    for event in batch.events:
        if getattr(event, "request", None) == request:
            yield LifeEvent(message.position, message.stored_ns, batch.writer, event)


async def windows(log: Log, request: str, life: Sequence[LifeEvent], now_ns: int) -> list[Window]:
    """Where to look for a request's decisions in the pool's log: windows that are tried in this order."""
    made_ns = time_of(request, now_ns)
    candidates: list[Window] = []
    if life:
        ended = isinstance(life[-1].event, RequestEnded)
        began_ns = life[0].stored_ns if made_ns is None else min(made_ns, life[0].stored_ns)
        for more_ns in (0, MARGINS_S[-1] * SECOND_NS):
            after = await log.position_at(began_ns - BEFORE_NS - more_ns)
            until = await log.position_at(life[-1].stored_ns + AFTER_NS + more_ns) if ended else FULL
            candidates.append(Window(after, until))
    elif made_ns is not None:
        margin_ns = MARGINS_S[-1] * SECOND_NS
        after = await log.position_at(made_ns - margin_ns)
        candidates.append(Window(after, await log.position_at(made_ns + SECOND_NS + margin_ns + AFTER_NS)))
    return [*candidates, WHOLE]


def is_complete(life: Sequence[LifeEvent], decisions: Iterable[Decision]) -> bool:
    """Was every attempt that the request log names decided by one of these, or is there at least one of them?"""
    decided = {decision.request for decision in decisions}
    attempts = {entry.event.attempt for entry in life if isinstance(entry.event, RequestRouted)}
    return attempts <= decided and bool(decided or (life and not attempts))


Say = Callable[[str], None]
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
    snapshots: SnapshotStore, log: Log, until: int = FULL, say: Say = print
) -> RouterState | None:
    """The newest state at or before a position that the log continues; None if there is none."""
    tried: set[int] = set()
    # Listed again after a failure: the snapshot may have been pruned for newer ones while it was read.
    while untried := [
        position for position in await continued(snapshots, log, until) if position not in tried
    ]:
        tried.add(untried[-1])
        state = await usable_state(snapshots, log, untried[-1:], say)
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
    return [
        position
        for position in await snapshots.positions()
        if position <= until and continues(position, bounds)
    ]


async def usable_state(
    snapshots: SnapshotStore, log: Log, positions: Iterable[int], say: Say = print
) -> RouterState | None:
    """The state of the first of these snapshots that can be read and is of this log; None if there is none."""
    identity = await log.identity()
    for position in positions:
        try:
            state = RouterState.restore(await snapshots.at(position))
        except (LogError, LookupError, TypeError, ValueError) as error:
            say(f"the snapshot at position {position} is unreadable: {error}")
            continue
        if state.log in ("", identity):
            return state
        say(f"the snapshot at position {position} is of another log that had this name before")
    return None


async def bookmarked_state(store: SnapshotStore, bookmark: str, log: Log) -> RouterState:
    """The state that a bookmark names. Raises `ConfigError` if the log does not continue it."""
    bounds = await log.bounds()
    position = (await store.bookmarks.all()).get(bookmark)
    if position is None:
        names = ", ".join(sorted(await store.bookmarks.all())) or "none"
        raise ConfigError(f"--from {bookmark}: no such bookmark; there are: {names}")
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
    return [
        Recorded(one.router, one.decision)
        async for piece in log.scan(after, until, pool_kinds("route"))
        for record in piece.records
        for one in decisions_in(record)
    ]


async def make_again(run: Reconstruction, pieces: AsyncIterator[Slice], until: int) -> None:
    """Fold from the state of a reconstruction until it has made all decisions again that it is asked for, the last before `until`."""
    start = run.state.position
    run.start()
    with Progress("folding the log") as progress:
        async for piece in pieces:
            for message in in_order(piece):
                run.step(message)
            progress.at(run.state.position - start, until - start)
            if not run.left:
                break


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
    records = [message for message in piece.records if message.position <= until]
    unreadable = tuple([message for message in piece.unreadable if message.position <= until])
    return piece._replace(records=records, unreadable=unreadable)
