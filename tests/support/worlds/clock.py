"""Clocks for tests: one that a test moves by hand, one that jumps over every sleep."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

WALL_NS = 1_800_000_000_000_000_000
"""What the wall clock shows when a test begins."""

TURNS = 25
"""Turns of the event loop after which everything that can go on has gone on."""


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class ManualClock:
    """Time stands still until `advance`; then sleepers wake in order, each at its own time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def wall_ns(self) -> int:
        """See `Clock.wall_ns`."""
        return WALL_NS + round(self.now_s * 1e9)

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._numbers), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        await settle()
        until = self.now_s + seconds
        while self._sleepers and self._sleepers[0][0] <= until + 1e-9:
            self.now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await settle()
        self.now_s = until


class SkippingClock(ManualClock):
    """A sleep moves the time and is over at once: right where only one task sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """A task that is cancelled, and waited for, at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
