"""An event loop on virtual time and without I/O: when nothing can run, time advances to the next timer.

Execution is deterministic for a program and a seed, in any process on any machine: nothing waits for real time, no thread
runs, and tasks hash by number, so sets of them have a fixed order.
"""

import asyncio
import gc
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, TypeVar, cast

T = TypeVar("T")

CANCELLED_TIMERS_MAX = 200
"""Cancelled timers that the heap may contain before it is cleaned: every deadline that was met leaves one."""


class Deadlock(Exception):
    """Nothing can run and no timer is scheduled."""


class Group:
    """The tasks of one simulated process. A paused group's callbacks are deferred, as in a suspended process.

    `on_step` is called before each callback: the points where a process can be interrupted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.on_step: Callable[[], None] | None = None
        self.paused = False
        self._backlog: deque[asyncio.Handle] = deque()

    def pause(self) -> None:
        """Defer the callbacks of this group until `resume`."""
        self.paused = True

    def resume(self, loop: "VirtualLoop") -> None:
        """Run the deferred callbacks, in their original order."""
        self.paused = False
        loop.reschedule(self._backlog)
        self._backlog.clear()

    def defer(self, handle: asyncio.Handle) -> bool:
        """Defer the callback if the group is paused; returns whether it was deferred."""
        if self.on_step is not None:
            self.on_step()
        if self.paused:
            self._backlog.append(handle)
        return self.paused


GROUP: ContextVar[Group | None] = ContextVar("headwater_sim_group", default=None)


class _Task(asyncio.Task[Any]):
    """A task that hashes by number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(cast(VirtualLoop, kwargs["loop"]).numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """A future that hashes by number, which it takes when it is hashed first: few are."""

    _number = 0

    def __hash__(self) -> int:
        if not self._number:
            self._number = next(cast(VirtualLoop, self.get_loop()).numbers)
        return self._number


class _Timer(asyncio.TimerHandle):
    """A timer made without asyncio's two constructors, which also serve loops in debug mode."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._scheduled = True
        self._repr = None
        self._source_traceback = None


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop. `failures` collects what no task or callback handled."""

    # Attributes of BaseEventLoop and its handles that type stubs omit (or type too narrowly): the reason for the
    # `type: ignore`s of this file.
    _ready: deque[asyncio.Handle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.failures: list[str] = []
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._on_failure)

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        """A future with a deterministic hash."""
        return _Future(loop=self)

    def start(self, group: Group, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work`, and all tasks that it starts, in `group`."""
        context = Context()
        context.run(GROUP.set, group)
        return self.create_task(work, name=name, context=context)

    # These three as in other loops, without their checks: every step of every task comes through here. The declared
    # methods also have type parameters for their arguments.
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback, as other loops do."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback after a delay, as other loops do."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback at a time, as other loops do; timers for the same time run in the order in which they were scheduled."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self.numbers), timer))
        return timer

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call `callback` after `delay_s` outside all groups, so that no pause defers it."""
        return self.call_later(delay_s, callback, *args, context=Context())

    def reschedule(self, handles: deque[asyncio.Handle]) -> None:
        """Schedule deferred callbacks."""
        self._ready.extend(handles)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, *, context: Context | None = None, **more: Any
    ) -> asyncio.Task[Any]:
        context = context if context is not None else copy_context()
        task = _Task(work, loop=loop, context=context, **more)
        group = context.get(GROUP)
        if group is not None:
            group.tasks[task] = None
            task.add_done_callback(lambda done: group.tasks.pop(done, None), context=Context())
        return task

    def _on_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(
            f"{context.get('message')}: {error!r} in {context.get('task') or context.get('future')}"
        )

    def _run_once(self) -> None:
        """Turns of the loop until it is stopped. Replaces the selector loop's one turn, as there is no I/O."""
        ready, timers = self._ready, self._timers
        while not self._stopping:
            if not ready or (timers and timers[0][0] <= self._now):
                self._take_timers()
            for _ in range(len(ready)):
                handle: Any = ready.popleft()
                if handle._cancelled:
                    continue
                context = handle._context
                group = context.get(GROUP)
                if group is not None and (group.paused or group.on_step is not None) and group.defer(handle):
                    continue
                try:
                    context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"Exception in {handle}", "exception": error})

    def _take_timers(self) -> None:
        """Make timers ready whose time has come; with nothing else to run, advance to the time of the next one."""
        timers, ready = self._timers, self._ready
        if self._timer_cancelled_count > max(CANCELLED_TIMERS_MAX, len(timers) // 2):
            timers[:] = [entry for entry in timers if not entry[2].cancelled()]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
                self._timer_cancelled_count -= 1
            if not timers:
                raise Deadlock("nothing can run and no timer is scheduled")
            self._now = max(self._now, timers[0][0])
        now = self._now
        while timers and timers[0][0] <= now:
            timer: Any = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer.cancelled():
                self._timer_cancelled_count -= 1
            else:
                ready.append(timer)

    def _write_to_self(self) -> None:
        """Nothing to wake: the loop does not sleep."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call at once: with a thread the order would be nondeterministic."""
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `work(loop)` to its end on a fresh loop."""
    loop = VirtualLoop()
    before = events._get_running_loop()
    # A run is short: its garbage is collected once after it, without the objects that existed before, as traversing
    # those of an engine's libraries takes longer than the run. What it makes stays in the youngest generation until then.
    gc.disable()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        gc.enable()
        gc.collect(1)
        events._set_running_loop(before)
        loop.close()
