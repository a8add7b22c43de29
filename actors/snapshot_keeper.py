"""Keeps a router's snapshots: restores the newest, takes new ones when they are due, beside the answering.

Taking one has three parts. On the loop, the cut: the loads as plain values, which decisions go on changing.
In a thread, while the fold holds still and queries are answered: one pass over the table. Behind that, with the
fold going on: hashing, the object store and the local cache.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import msgspec
import structlog

from headwater.actors.world import World
from headwater.events.errors import LogError
from headwater.events.log import Bounds, Log
from headwater.events.retention import RetentionGuard
from headwater.events.snapshot_policy import Policy, Tail, due
from headwater.events.snapshots import Snapshot, SnapshotStore
from headwater.router.packing import prepare
from headwater.router.state import RouterState

PERIOD_S = 1.0
SETTLE_S = 0.005
SETTLE_TRIES = 200


class SnapshotKeeper:
    """Snapshots of one pool for one router.

    `state` gives the fold's present state. `settled` tells whether it holds nothing that the log does not: with
    decisions under way it is ahead of the log, and no snapshot is taken. `quiet` keeps new decisions waiting for a
    moment, so that it settles on a busy pool too. While the state is not `sound` none is taken: the next life would
    begin with what is wrong.
    """

    def __init__(
        self,
        world: World,
        pool: str,
        *,
        state: Callable[[], RouterState],
        settled: Callable[[], bool],
        quiet: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        policy: Policy | None = None,
        sound: Callable[[], bool] = lambda: True,
    ) -> None:
        self._world = world
        self._store = SnapshotStore(world.blobs, pool, cache=world.cache, ids=world.ids, prepare=prepare)
        self._state = state
        self._settled = settled
        self._quiet = quiet
        self._sound = sound
        self._was_sound = True
        self._policy = policy or Policy()
        self._still = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._saved_position = 0
        self._saved_at_s = world.clock.monotonic_s()
        self._fold_s = 0.0
        self._cost_s = 0.0
        self._log = structlog.get_logger("headwater.router").bind(pool=pool)

    @asynccontextmanager
    async def folding(self) -> AsyncIterator[None]:
        """Whoever changes the state beyond its loads does so in here: not while the table is read."""
        async with self._still:
            began = self._world.clock.monotonic_s()
            yield
            self._fold_s += self._world.clock.monotonic_s() - began

    async def restore(self, log: Log) -> RouterState | None:
        """The state of the newest snapshot that the log continues; None for a fold from the log's start.

        None as well if it cannot be read, which is logged: the log itself has everything it still holds.
        """
        bounds = await log.bounds()
        try:
            snapshot = await self._store.newest(lambda position: continues(position, bounds))
        except LogError as error:
            self._log.warning("snapshots_unavailable", reason=str(error))
            return None
        if snapshot is None:
            return None
        if snapshot.facts.get("log", "") not in ("", await log.identity()):
            self._log.error("snapshot_of_another_log", log_position=snapshot.position)
            return None
        try:
            # Not on the loop: the lease is renewed meanwhile.
            state = await asyncio.to_thread(RouterState.restore, snapshot)
        except (msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
            # Written by another release.
            self._log.error("snapshot_unusable", log_position=snapshot.position, reason=repr(error))
            return None
        self._note(snapshot.position)
        return state

    async def run(self, log: Log) -> None:
        """Take a snapshot whenever one is due, or the log is about to cut what the newest one needs, for ever."""
        clock = self._world.clock
        guard = RetentionGuard(log, clock)
        while True:
            await clock.sleep(PERIOD_S)
            position = self._state().position
            if position < self._saved_position:
                # The fold began anew on another log.
                self._saved_position = 0
            age_s = clock.monotonic_s() - self._saved_at_s
            grown = position - self._saved_position
            pressed = await guard.due(self._saved_position) if grown > 0 else ""
            if pressed or due(self._policy, Tail(grown, self._fold_s, age_s, self._cost_s)):
                # Waiting for a moment without decisions under way costs nothing; on a busy pool none may come.
                for _ in range(SETTLE_TRIES):
                    if self._settled():
                        break
                    await clock.sleep(SETTLE_S)
                await self.save(log)

    async def save(self, log: Log) -> None:
        """Take a snapshot now, unless nothing changed since the last or decisions are under way."""
        # One at a time: a stop may ask while one is being written.
        async with self._saving:
            sound, self._was_sound = self._was_sound, self._sound()
            if not self._was_sound:
                if sound:
                    self._log.error(
                        "snapshots_paused", reason="another router of the pool holds another state"
                    )
                return
            began = self._world.clock.monotonic_s()
            fold_s = self._fold_s
            snapshot = await self._take()
            if snapshot is None:
                return

            async def last() -> int:
                return (await log.bounds()).last

            try:
                manifest = await self._store.save(snapshot, last)
            except LogError as error:
                self._log.warning("snapshot_not_saved", reason=str(error))
                return
            self._cost_s = self._world.clock.monotonic_s() - began
            self._note(snapshot.position, fold_s)
            self._log.info(
                "snapshot_saved",
                log_position=snapshot.position,
                digest=snapshot.digest,
                bytes=sum(chunk.size for chunk in manifest.chunks),
                seconds=round(self._cost_s, 3),
            )

    async def _take(self) -> Snapshot | None:
        async with AsyncExitStack() as held:
            if not self._settled():
                await held.enter_async_context(self._quiet())
            async with self._still:
                state = self._state()
                if not self._settled() or state.position == self._saved_position:
                    return None
                # No decision may come between that question and these loads.
                loads = msgspec.to_builtins(state.loads)
                await held.aclose()
                try:
                    return await self._cut(state, loads)
                except ValueError as error:
                    self._log.error("snapshot_not_taken", log_position=state.position, reason=str(error))
                    return None

    async def _cut(self, state: RouterState, loads: Any) -> Snapshot:
        """A snapshot of this moment; `loads` are those of it as plain values, since decisions go on."""
        made_ns = self._world.clock.wall_ns()
        work = asyncio.ensure_future(asyncio.to_thread(state.snapshot, loads, made_ns))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread goes on reading the table: the fold holds still until it is done.
            await asyncio.wait({work})
            raise

    def _note(self, position: int, covered_s: float = 0.0) -> None:
        """A snapshot is there; `covered_s` of the folding is behind it, the rest came while it was written."""
        self._saved_position = position
        self._saved_at_s = self._world.clock.monotonic_s()
        self._fold_s -= covered_s


def continues(position: int, bounds: Bounds) -> bool:
    """Is every message behind `position` still in the log, and `position` itself not beyond it?"""
    return bounds.first - 1 <= position <= bounds.last
