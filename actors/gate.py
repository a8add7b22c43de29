"""The ready gate: what comes for a worker between its lease and its place in the log waits, in order.

A router may decide for a worker the moment its joining is in the log, before the worker itself knows that it is. And
a request for an epoch whose joining then fails is refused, so that its edge tries another worker.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from headwater.actors.bus_port import Bus, Handler, Message
from headwater.schemas.inference import Refused

WAITING_MAX = 256
WAIT_S_MAX = 1.5
"""Less than what an edge waits for a worker's answer: a refusal in time is worth more than an answer too late."""

_encode = msgspec.msgpack.Encoder().encode


class Gate:
    """Holds messages until `open`. Those that wait too long, or are too many, are refused."""

    def __init__(
        self, bus: Bus, worker: str, spawn: Callable[[Coroutine[Any, Any, None], str], object]
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._spawn = spawn
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

    def before(self, handler: Handler) -> Handler:
        """The same handler, behind this gate."""

        async def handle(message: Message) -> None:
            if self._opened.is_set() and not self._waiting:
                await handler(message)
            elif self._waiting >= WAITING_MAX:
                await self._refuse(message, f"{WAITING_MAX} requests wait for it to get ready")
            else:
                # Not here: a subscription hands out one message after the other.
                self._waiting += 1
                self._spawn(self._wait(message, handler), "gate")

        return handle

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

    async def _refuse(self, message: Message, reason: str) -> None:
        if message.reply:
            refused = Refused(f"worker {self._worker}: {reason}", True)
            await self._bus.publish(message.reply, _encode(refused))
