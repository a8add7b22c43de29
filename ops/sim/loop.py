"""An event loop without a clock and without a kernel: when nothing can run, time jumps to the next timer.

The same program with the same seed does the same things in the same order, in any process on any machine: nothing
here waits, no thread runs, and tasks hash by number, so sets of them have one order.
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
"""Cancelled timers that may lie in the heap before it is swept: every deadline that was kept leaves one."""


class Deadlock(Exception):
    """Nothing can run and no timer is set."""


class Group:
    """The tasks of one simulated process. A paused group's callbacks wait, like those of a stopped process.

    `on_step` is called before each callback: the places where a process can be interrupted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.on_step: Callable[[], None] | None = None
        self._paused = False
        self._backlog: deque[asyncio.Handle] = deque()

    def pause(self) -> None:
        """Run nothing of this group until `resume`."""
        self._paused = True

    def resume(self, loop: "VirtualLoop") -> None:
        """Run what has waited, in the order in which it would have run."""
        self._paused = False
        loop.take_back(self._backlog)
        self._backlog.clear()

    def holds(self, handle: asyncio.Handle) -> bool:
        """Keep the callback back if the group is paused."""
        if self.on_step is not None:
            self.on_step()
        if self._paused:
            self._backlog.append(handle)
        return self._paused


GROUP: ContextVar[Group | None] = ContextVar("headwater_sim_group", default=None)


class _Task(asyncio.Task[Any]):
    """A task that hashes by number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(cast(VirtualLoop, kwargs["loop"]).numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(asyncio.Future[Any]):
    """A future that hashes by number."""

    def __init__(self, *, loop: "VirtualLoop") -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `failures` collects what no task or callback handled."""

    # What BaseEventLoop and its handles keep and their type stubs do not tell (or tell too narrowly): hence the
    # `type: ignore`s of this file.
    _ready: deque[asyncio.Handle]
    _timer_cancelled_count: int

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.failures: list[str] = []
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._on_failure)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        """A future with an order of its own."""
        return _Future(loop=self)

    def start(self, group: Group, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work`, and all that it starts, as part of `group`."""
        context = Context()
        context.run(GROUP.set, group)
        return self.create_task(work, name=name, context=context)

    # The declared method also takes packs of argument types, which asyncio itself gives up on telling apart.
    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As any loop does; of two timers for one moment the one that was set first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self.numbers), timer))
        # As asyncio does, so that cancelling it is counted; the attribute is not in the stubs.
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call `callback` after `delay_s` on behalf of nobody, so that no pause holds it."""
        return self.call_later(delay_s, callback, *args, context=Context())

    def take_back(self, handles: deque[asyncio.Handle]) -> None:
        """Make callbacks ready that were held back."""
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
        """One turn. Replaces the selector loop's: there is nothing to select on."""
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
                raise Deadlock("nothing can run and no timer is set")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if timer.cancelled():
                self._timer_cancelled_count -= 1
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            group = handle._context.get(GROUP)  # type: ignore[attr-defined]
            if group is None or not group.holds(handle):
                handle._run()

    def _write_to_self(self) -> None:
        """Nobody sleeps, so nobody is to be woken."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call at once: a thread would make the order of things a matter of luck."""
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
    # A run is short: what it leaves is collected behind it, at once instead of all the time. What was there before
    # is left out: looking through a process with an engine's libraries in it takes longer than the run.
    gc.freeze()
    gc.disable()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        gc.enable()
        gc.collect()
        gc.unfreeze()
        events._set_running_loop(before)
        loop.close()
