"""Turns by priority: one request runs, the others wait."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class PriorityTurns:
    """One holder at a time; of those that wait, the one with the lowest number is next, then the one that came first."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(not turn.done() for _, _, turn in self._queue)

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """Wait until no request runs and none that waits has a lower number as its priority, or came before."""
        if self.running:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (priority, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self.running = 1
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next request run; `running` stays set for it, so that no other begins in between."""
        while self._queue:
            _, _, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self.running = 0
