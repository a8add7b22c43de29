"""How every Headwater process handles signals, its parent and its event loop."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import structlog
import uvloop

from headwater.engines.process import ENDING, freeze_heap

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

_log = structlog.get_logger("headwater.process")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it dies. Linux only, else nothing."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)


def handle_ending(loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
    """Call `on_signal` with the number of each signal that asks this process to end."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)


def replace_handlers(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Have `handler` called, outside an event loop, for each signal that asks this process to end."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def exit_code(number: int) -> int:
    """Exit code of a process that ended in order because of a signal, as shells give it: 143 for SIGTERM."""
    return 128 + number


def run(main: Callable[[asyncio.Event], Awaitable[int]], *, reports_signal: bool = False) -> int:
    """Run `main(stop)` on uvloop; `stop` is set by a signal of `ENDING`. A second SIGINT ends at once.

    A second SIGTERM or SIGHUP does not: supervisors send one to each process of a service, and `up` passes its own on.

    `reports_signal`: an orderly end because of a signal is `exit_code` of it. Then 0 means that the process ended of its
    own accord, and a supervisor need not start it again. SIGUSR1 prints where every task stands: what to ask a process
    that seems to hang.
    """

    async def wrapped() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        received: list[int] = []

        def on_signal(number: int) -> None:
            received.append(number)
            if received.count(signal.SIGINT) > 1:
                os._exit(exit_code(signal.SIGINT))
            stop.set()

        handle_ending(loop, on_signal)
        loop.add_signal_handler(signal.SIGUSR1, _print_tasks)
        freeze_heap()
        code = await main(stop)
        return exit_code(received[0]) if reports_signal and received and code == 0 else code

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(wrapped())


def run_command(main: Callable[[], Awaitable[int]]) -> int:
    """Run an operator's command on uvloop; returns its exit code. The first signal of `ENDING` cancels it."""
    received: list[int] = []

    async def wrapped() -> int:
        task = asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            received.append(number)
            task.cancel()

        handle_ending(asyncio.get_running_loop(), on_signal)
        return await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(wrapped())
        except asyncio.CancelledError:
            if not received:
                raise
            return exit_code(received[0])
