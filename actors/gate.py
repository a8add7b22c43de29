"""The ready gate: what comes for a worker between its lease and its place in the log waits, in order.

A router may decide for a worker the moment its joining is in the log, before the worker itself knows that it is. And
a request for an epoch whose joining then fails is refused, so that its edge tries another worker.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headwater.actors.bus_port import Handler, Message

WAITING_MAX = 256
WAIT_S_MAX = 1.5
"""Less than what an edge waits for a worker's answer: a refusal in time is worth more than an answer too late."""

Refuse = Callable[[Message, str], Coroutine[Any, Any, None]]


class Gate:
    """Holds messages until `open`. `refuse` answers those that waited too long, or were too many."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None], str], object], refuse: Refuse) -> None:
        self._spawn = spawn
        self._refuse = refuse
        self._waiting = 0
        self._opened = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Messages held now."""
        return self._waiting

    def open(self) -> None:
        """Let everything through, what waits first."""
        self._opened.set()

    def shut(self) -> None:
        """Hold what comes from now on."""
        self._opened.clear()

    def holds(self, message: Message, handler: Handler) -> bool:
        """Is the message held, to be handed to `handler` later? False: handle it now."""
        if self._opened.is_set() and not self._waiting:
            return False
        if self._waiting >= WAITING_MAX:
            self._spawn(self._refuse(message, f"{WAITING_MAX} requests wait for it to get ready"), "refuse")
            return True
        self._waiting += 1
        self._spawn(self._wait(message, handler), "gate")
        return True

    async def _wait(self, message: Message, handler: Handler) -> None:
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await self._opened.wait()
        except TimeoutError:
            await self._refuse(message, "it is not ready yet")
        else:
            # Event wakes in the order of waiting: what came first is handled first.
            await handler(message)
        finally:
            self._waiting -= 1
