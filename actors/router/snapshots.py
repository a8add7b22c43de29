"""A router's snapshots: takes new ones when they are due, while queries are answered.

Taking one has three parts. On the event loop: the loads as plain values, because decisions keep changing them.
In a thread, while the fold is stopped and queries are answered: one pass over the index. Then, with the fold
running: hashing, the object store and the local cache.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.snapshot_reader import SnapshotReader
from headwater.events.errors import LogError
from headwater.events.log import Log
from headwater.events.snapshots.policy import Policy, Tail, due
from headwater.events.snapshots.retention import RetentionGuard
from headwater.events.snapshots.store import Snapshot
from headwater.router.fold.state import RouterState

PERIOD_S = 1.0
SETTLE_S = 0.005
SETTLE_TRIES = 200


class SnapshotSource(Protocol):
    """The router whose state is saved."""

    @property
    def state(self) -> RouterState:
        """The fold."""
        ...

    @property
    def is_settled(self) -> bool:
        """Does the log hold every decision that the state includes? Else it is ahead of the log and must not be saved."""
        ...

    @property
    def is_sound(self) -> bool:
        """Does the state agree with other routers'? Else the next incarnation must not start from it."""
        ...

    def pause(self) -> AbstractAsyncContextManager[None]:
        """Hold back new decisions for a short time, so that the state settles on a busy pool too."""
        ...


class SnapshotKeeper(SnapshotReader):
    """Restores and takes the snapshots of one pool for one router."""

    def __init__(
        self, ports: Ports, pool: str, source: SnapshotSource, *, policy: Policy | None = None
    ) -> None:
        super().__init__(ports, pool)
        self._source = source
        self._was_sound = True
        self._policy = policy or Policy()
        self._still = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._saved_position = 0
        self._saved_at_s = ports.clock.monotonic_s()
        self._fold_s = 0.0
        self._cost_s = 0.0

    @asynccontextmanager
    async def folding(self) -> AsyncIterator[None]:
        """See `FoldGuard`: the index must not change while a snapshot reads it."""
        async with self._still:
            began = self._ports.clock.monotonic_s()
            yield
            self._fold_s += self._ports.clock.monotonic_s() - began

    async def restore(self, log: Log) -> RouterState | None:
        """See `SnapshotReader.restore`. Later snapshots are due relative to this one."""
        state = await super().restore(log)
        if state is not None:
            self._note_saved(state.position)
        return state

    async def run(self, log: Log) -> None:
        """Take a snapshot when one is due, or retention is about to cut what the newest one needs. Does not return."""
        clock = self._ports.clock
        guard = RetentionGuard(log, clock)
        while True:
            await clock.sleep(PERIOD_S)
            position = self._source.state.position
            if position < self._saved_position:
                # The fold restarted on another log.
                self._saved_position = 0
            age_s = clock.monotonic_s() - self._saved_at_s
            grown = position - self._saved_position
            pressed = await guard.due(self._saved_position) if grown > 0 else ""
            if pressed or due(self._policy, Tail(grown, self._fold_s, age_s, self._cost_s)):
                # Waiting until no decision is unwritten costs nothing; on a busy pool that may not happen.
                for _ in range(SETTLE_TRIES):
                    if self._source.is_settled:
                        break
                    await clock.sleep(SETTLE_S)
                await self.save(log)

    async def save(self, log: Log) -> None:
        """Take a snapshot now, unless nothing has changed since the last one or the state does not settle."""
        # One at a time: a drain may call this while one is being written.
        async with self._saving:
            sound, self._was_sound = self._was_sound, self._source.is_sound
            if not self._was_sound:
                if sound:
                    self._log.error(
                        "snapshots_paused", reason="another router of the pool has a different state"
                    )
                return
            began = self._ports.clock.monotonic_s()
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
            self._cost_s = self._ports.clock.monotonic_s() - began
            self._note_saved(snapshot.position, fold_s)
            self._log.info(
                "snapshot_saved",
                log_position=snapshot.position,
                digest=snapshot.digest,
                bytes=sum(chunk.size for chunk in manifest.chunks),
                seconds=round(self._cost_s, 3),
            )

    async def _take(self) -> Snapshot | None:
        async with AsyncExitStack() as held:
            if not self._source.is_settled:
                await held.enter_async_context(self._source.pause())
            async with self._still:
                state = self._source.state
                if not self._source.is_settled or state.position == self._saved_position:
                    return None
                # No decision may be made between that check and this copy.
                loads = msgspec.to_builtins(state.loads)
                await held.aclose()
                try:
                    return await self._cut(state, loads)
                except ValueError as error:
                    self._log.error("snapshot_not_taken", log_position=state.position, reason=str(error))
                    return None

    async def _cut(self, state: RouterState, loads: Any) -> Snapshot:
        """A snapshot of the present state; `loads` are a copy, as plain values, because decisions keep changing them."""
        made_ns = self._ports.clock.wall_ns()
        work = asyncio.ensure_future(asyncio.to_thread(state.snapshot, loads, made_ns))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread still reads the index: the fold stays stopped until it is done.
            await asyncio.wait({work})
            raise

    def _note_saved(self, position: int, covered_s: float = 0.0) -> None:
        """A snapshot exists; `covered_s` of the time spent folding is included in it, the rest came later."""
        self._saved_position = position
        self._saved_at_s = self._ports.clock.monotonic_s()
        self._fold_s -= covered_s
