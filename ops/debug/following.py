"""Both logs as they grow, for commands that show the present."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from headwater.events.ports import Log, LogError, Slice


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these until the block ends. Raises the `LogError` that ends one of them as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as failed:
        error = _first(failed)
        if error is None:
            raise
        raise error from failed


def _first(failed: BaseExceptionGroup[BaseException]) -> LogError | None:
    for one in failed.exceptions:
        found = _first(one) if isinstance(one, BaseExceptionGroup) else one
        if isinstance(found, LogError):
            return found
    return None


async def follow(log: Log, after: int, apply: Callable[[Slice], None]) -> None:
    """Give every slice after a position to `apply`. Does not return."""
    async for piece in log.read(after, follow=True):
        apply(piece)
