"""The lifecycle of an actor: start, run, drain, close. All its tasks are in one task group and end with it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import structlog

from headwater.actors.runtime.discovery import Requests, ServiceEndpoint
from headwater.actors.runtime.lease import LeaseLost
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tasks import cancel_all
from headwater.engines.engine import EngineError, EngineUnavailable
from headwater.engines.process.interruption import EngineInterrupted
from headwater.events.errors import LogError
from headwater.events.writer import WriterFenced
from headwater.schemas.names import InvalidName

EXPECTED = (EngineError, LogError, LeaseLost, WriterFenced)
"""Failures whose message is sufficient; any other is logged with its traceback."""


class Actor(ABC):
    """Base of the actors. A subclass implements `start`, `drain`, `close` and `stats`."""

    kind: str
    unrecoverable: bool
    """Set when a restart cannot repair the failure: the engine is not installed, the model does not fit."""
    unexpected: list[Exception]
    """Failures that indicate a bug in Headwater."""

    def __init__(self, ports: Ports, name: str) -> None:
        if name.startswith("__"):
            raise InvalidName(f"{self.kind} {name!r}: names that begin with two underscores are reserved")
        self.ports = ports
        self.name = name
        self.log = structlog.get_logger(f"headwater.{self.kind}").bind(**{self.kind: name})
        self.ready = asyncio.Event()
        self.unrecoverable = False
        self.unexpected: list[Exception] = []
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.requests = Requests()
        self._service = ServiceEndpoint(ports.bus, self.kind, name, self.stats, self.requests)

    @abstractmethod
    async def start(self) -> None:
        """Prepare and start the loops with `spawn`. When this returns, the actor is `ready`."""

    @abstractmethod
    async def drain(self) -> None:
        """Stop accepting requests; finish those in flight or hand them over; answer those that are queued."""

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. Called once, also when `start` failed."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Statistics for `$SRV.STATS`."""

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether it serves, and the body of its process's /health."""
        status = "draining" if self.stopping else "ok" if self.ready.is_set() else "starting"
        return status == "ok", {"status": status}

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the actor's task group. If it raises, the actor fails with that reason.

        Raises `RuntimeError` before the actor runs and once it is ending.
        """
        if self._group is None:
            work.close()
            raise RuntimeError(f"{self.kind} {self.name} is not running")
        try:
            task = self._group.create_task(work, name=f"{self.kind} {self.name}: {name}")
        except RuntimeError:
            # The group is shutting down: the actor is ending.
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> None:
        """Request that the actor drain and end. Returns at once."""
        self._stopping.set()

    async def _start_unless_stopped(self) -> bool:
        """Start; False if `stop` was called before the end of that: the start is then cancelled, wherever it waits.

        Also if a signal interrupted an engine that blocked the event loop, whose handler will call `stop`.
        """
        starting = asyncio.create_task(self.start(), name=f"{self.kind} {self.name}: start")
        stopping = asyncio.create_task(self._stopping.wait(), name=f"{self.kind} {self.name}: stop")
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return True
            return False
        except EngineInterrupted:
            self.stop()
            return False
        finally:
            await cancel_all([starting, stopping])

    async def run(self) -> str:
        """Run until stopped (returns "") or failed (returns the reason)."""
        reason = ""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._service.start()
                if await self._start_unless_stopped():
                    self.ready.set()
                    await self._stopping.wait()
                    await self.drain()
                await cancel_all(self._tasks)
        except* Exception as errors:
            for error in errors.exceptions:
                self.unrecoverable = self.unrecoverable or isinstance(error, EngineUnavailable)
                unexpected = None if isinstance(error, EXPECTED) else error
                self.unexpected += [unexpected] if unexpected is not None else []
                self.log.error("actor_failed", reason=f"{type(error).__name__}: {error}", exc_info=unexpected)
            reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
        finally:
            self._group = None
            await self._service.stop()
            await self.close()
        return reason
