"""The lifecycle of an actor (start, run, drain, close), and the restart of failed ones. All its tasks are in one task group and end with it."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple

import structlog

from headwater.actors.runtime.lease import LeaseLost
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import Requests, ServiceEndpoint
from headwater.engines.engine import EngineError, EngineUnavailable
from headwater.engines.process import EngineInterrupted
from headwater.events.ports import LogError
from headwater.events.writer import WriterFenced
from headwater.schemas.clock import Clock
from headwater.schemas.names import InvalidName

AGAIN_S = 0.2

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Runs a coroutine as a named task of an actor: see `Actor.spawn`."""


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until each has ended.

    Once is not enough: `asyncio.wait_for` of Python 3.11 drops a cancellation that arrives in the same turn of the
    event loop as its result, and the NATS client is built on it.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)


# An actor.

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
        """Return whether the actor serves, and the body of its process's /health."""
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

    def log_fields(self) -> dict[str, Any]:
        """Fields of all log lines of its tasks; `log_position` may be a function that returns it."""
        return {self.kind: self.name}

    async def run(self) -> str:
        """Run until stopped (returns "") or failed (returns the reason)."""
        with structlog.contextvars.bound_contextvars(**self.log_fields()):
            return await self._run()

    async def _run(self) -> str:
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


# Restarts of failed actors and processes, with exponential backoff and up to a limit.

_log = structlog.get_logger("headwater.supervisor")


class RestartPolicy(NamedTuple):
    """Limits of restarts: at most `restarts_max` within `window_s`; the wait before each is `delay_s`, doubling up to `delay_s_max`.

    A child that ran for `steady_s` starts again with `delay_s`. One that failed more often than that and is kept all the
    same waits `kept_delay_s`. One that fails to start waits up to as long; without a reason to keep it, it has `starts_max` tries.
    """

    restarts_max: int = 10
    window_s: float = 120.0
    delay_s: float = 0.2
    delay_s_max: float = 5.0
    steady_s: float = 20.0
    kept_delay_s: float = 30.0
    starts_max: int = 2


DEFAULT_POLICY = RestartPolicy()


class Unrecoverable(Exception):
    """Raised by a child that a restart cannot repair."""


class StartFailed(Exception):
    """Raised by a child that ended before it was ready. However long it took, that is no steady run; another start may succeed."""


class RestartLimitReached(Exception):
    """A child failed too often. The message contains its name and its last reason."""


class Backoff:
    """When to restart a child, and when to stop restarting it. Pure: time is an argument."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures: deque[float] = deque()
        self._delay_s = policy.delay_s
        self.starts_failed = 0
        """Starts that have failed since it last ran."""

    def next_start_s(self) -> float:
        """Seconds until the next start after one that failed: doubles up to `kept_delay_s`."""
        self.starts_failed += 1
        delay: float = self._policy.delay_s * 2 ** min(self.starts_failed - 1, 30)
        return min(delay, self._policy.kept_delay_s)

    def next_delay_s(self, now_s: float, ran_s: float) -> float | None:
        """Seconds until the next start after a failure at `now_s`; None once the limit is reached."""
        policy = self._policy
        self.starts_failed = 0
        if ran_s >= policy.steady_s:
            self._delay_s = policy.delay_s
        self._failures.append(now_s)
        while now_s - self._failures[0] > policy.window_s:
            self._failures.popleft()
        if len(self._failures) > policy.restarts_max:
            return None
        delay = self._delay_s
        self._delay_s = min(2 * delay, policy.delay_s_max)
        return delay


def _given_up() -> bool:
    return False


async def supervise(
    name: str,
    run: Callable[[], Awaitable[str]],
    clock: Clock,
    policy: RestartPolicy = DEFAULT_POLICY,
    *,
    is_kept: Callable[[], bool] = _given_up,
) -> None:
    """Run `run`, and again whenever it returns a reason or raises.

    Returns once `run` returns an empty reason, which means an intended end. Raises `RestartLimitReached`; `is_kept` is
    asked each time that the limit is reached, and prevents it. Nothing prevents it for an `Unrecoverable` child.
    """
    backoff = Backoff(policy)
    while True:
        started = clock.monotonic_s()
        try:
            reason = await run()
        except Unrecoverable as error:
            raise RestartLimitReached(f"{name}: {error}") from error
        except StartFailed as error:
            delay = backoff.next_start_s()
            if backoff.starts_failed >= policy.starts_max and not is_kept():
                raise RestartLimitReached(f"{name}: {error}") from error
            _log.warning("child_restarting", child=name, reason=str(error), delay_s=delay)
            await clock.sleep(delay)
            continue
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.exception("child_failed", child=name)
        if not reason:
            return
        now = clock.monotonic_s()
        later = backoff.next_delay_s(now, now - started)
        delay = policy.kept_delay_s if later is None else later
        if later is None:
            often = f"{name} failed {policy.restarts_max + 1} times within {policy.window_s:.0f} s, last: {reason}"
            if not is_kept():
                raise RestartLimitReached(often)
            _log.error("child_restart_limit_exceeded", child=name, reason=often, delay_s=delay)
        _log.warning("child_restarting", child=name, reason=reason, delay_s=delay)
        await clock.sleep(delay)
