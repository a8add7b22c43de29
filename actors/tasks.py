"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.2


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until each has ended.

    Once is not enough: `asyncio.wait_for` of Python 3.11 forgets a cancellation that meets its result in the
    same turn of the loop, and the NATS client is built on it.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
