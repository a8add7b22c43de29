"""Starting and ending asyncio tasks."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

AGAIN_S = 0.2

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Runs a coroutine as a named task of an actor: see `Actor.spawn`."""


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until each has ended.

    Once is not enough: `asyncio.wait_for` of Python 3.11 drops a cancellation that arrives in the same turn of the
    event loop as its result, and the NATS client is built on it.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
