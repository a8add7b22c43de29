"""The life of an actor: start, work, drain, close. One task group; nothing outlives it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import structlog

from headwater.actors.lease import LeaseLost
from headwater.actors.service import Service
from headwater.actors.tasks import cancel_all
from headwater.actors.world import World
from headwater.engines.engine import EngineError, EngineUnavailable
from headwater.events.errors import LogError
from headwater.events.writer import WriterFenced
from headwater.schemas.names import InvalidName

EXPECTED = (EngineError, LogError, LeaseLost, WriterFenced)
"""Reasons to end that say everything themselves; any other is logged with its traceback."""


class Actor(ABC):
    """Base of the actors. A subclass gives `start`, `drain`, `close` and `stats`."""

    kind: str
    hopeless: bool
    """Set when starting it again can not help: the engine is not installed, the model does not fit."""
    unexpected: list[Exception]
    """Reasons to end that no actor should have: mistakes of ours."""

    def __init__(self, world: World, name: str) -> None:
        if name.startswith("__"):
            raise InvalidName(
                f"{self.kind} {name!r}: names that begin with two underscores are Headwater's own"
            )
        self.world = world
        self.name = name
        self.log = structlog.get_logger(f"headwater.{self.kind}").bind(**{self.kind: name})
        self.ready = asyncio.Event()
        self.hopeless = False
        self.unexpected: list[Exception] = []
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._service = Service(world.bus, self.kind, name, self.stats)

    @abstractmethod
    async def start(self) -> None:
        """Get ready to work; spawn loops with `spawn`. Set by the time it returns: `ready`."""

    @abstractmethod
    async def drain(self) -> None:
        """Take nothing new; finish or hand over what runs; answer what is queued."""

    @abstractmethod
    async def close(self) -> None:
        """Give back everything held. Called once, also when `start` failed."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Numbers for `$SRV.STATS`."""

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the actor's task group. If it raises, the actor ends with that reason."""
        if self._group is None:
            work.close()
            raise RuntimeError(f"{self.kind} {self.name} is not running")
        try:
            task = self._group.create_task(work, name=f"{self.kind} {self.name}: {name}")
        except RuntimeError:
            # The group is shutting down: the actor is about to end.
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> None:
        """Ask the actor to drain and end. Returns at once."""
        self._stopping.set()

    async def run(self) -> str:
        """Live until stopped ("" is returned) or broken (the reason is returned)."""
        reason = ""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._service.start()
                await self.start()
                self.ready.set()
                await self._stopping.wait()
                await self.drain()
                await cancel_all(self._tasks)
        except* Exception as errors:
            for error in errors.exceptions:
                self.hopeless = self.hopeless or isinstance(error, EngineUnavailable)
                unexpected = None if isinstance(error, EXPECTED) else error
                self.unexpected += [unexpected] if unexpected is not None else []
                self.log.error("actor_failed", reason=f"{type(error).__name__}: {error}", exc_info=unexpected)
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
        finally:
            self._group = None
            await self._service.stop()
            await self.close()
        return reason
