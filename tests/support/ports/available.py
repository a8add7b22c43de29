"""Calls that outlast a server's restart or an election."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headwater.events.ports import LogUnavailable

T = TypeVar("T")


async def when_available(call: Callable[[], Awaitable[T]]) -> T:
    """Call, again after each `LogUnavailable`, as readers and writers do while their server comes back or a cluster learns of a new stream."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except LogUnavailable:
                await asyncio.sleep(0.05)
