"""Waiting for a condition instead of sleeping."""

import asyncio
from collections.abc import Callable

POLL_S = 0.01


async def eventually(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Return once `condition()` holds. Fails after `within_s`, which is meant to be generous."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s} s: {condition}"
        await asyncio.sleep(POLL_S)
