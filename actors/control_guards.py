"""What surrounds a control command: refusals with a status, a state that is put back, and a limit on the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headwater.engines.engine import EngineDied

ENGINE_S_MAX = 300.0
"""How long the engine may take for one thing: weights are read again from a slow disk."""


class Refusal(Exception):
    """Not now, not here: an answer with this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Undo:
    """Calls `undo` where its block raises."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Of a dead engine there is nothing to undo: the worker ends.
        if kind is not None and not issubclass(kind, EngineDied):
            self._undo()


@asynccontextmanager
async def engine_time(what: str) -> AsyncIterator[None]:
    """At most `ENGINE_S_MAX`. Raises TimeoutError that says so."""
    try:
        async with asyncio.timeout(ENGINE_S_MAX):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"the engine did not {what} within {ENGINE_S_MAX:g} s") from error
