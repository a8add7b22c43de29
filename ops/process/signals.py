"""What every Headwater process does about signals, its parent and its event loop."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import structlog
import uvloop

from headwater.engines.process.heap import freeze_heap

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


def exit_code(number: int) -> int:
    """Exit code of a process that ended in order because of a signal, as shells give it: 143 for SIGTERM."""
    return 128 + number


def run(main: Callable[[asyncio.Event], Awaitable[int]], *, reports_signal: bool = False) -> int:
    """Run `main(stop)` on uvloop; `stop` is set by SIGINT or SIGTERM. A second signal ends at once.

    `reports_signal`: an orderly end because of a signal is `exit_code` of it. Then 0 means that the process ended of its
    own accord, and a supervisor need not start it again. SIGUSR1 prints where every task stands: what to ask a process
    that seems to hang.
    """

    async def wrapped() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        received: list[int] = []

        def on_signal(number: int) -> None:
            if stop.is_set():
                os._exit(exit_code(signal.SIGINT))
            received.append(number)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, _print_tasks)
        freeze_heap()
        code = await main(stop)
        return exit_code(received[0]) if reports_signal and received and code == 0 else code

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(wrapped())
