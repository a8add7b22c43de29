"""The signals that ask a process to end, and how they interrupt an engine that loads.

Loading vLLM, SGLang or TensorRT-LLM blocks the thread of the event loop for seconds to minutes, or until it is killed where a node that it
waits for does not come: a handler of the event loop would run only after that.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end in order. One that the process was started to ignore, as by `nohup`, stays ignored."""

CLEAN_UP_S: Final = 10.0
"""Time that a library has to end its own processes after an interruption: vLLM waits 5 s for its own before it kills them."""


class EngineInterrupted(Exception):
    """Signal `number`, which asks the process to end, interrupted what blocked its main thread: an engine, or a download."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number} asked the process to end while its main thread was blocked")
        self.number = number


class _Interrupted(BaseException):
    """Not an `Exception`: libraries catch those and continue."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within this block a signal of `ENDING` interrupts the main thread wherever it is; in other threads it does nothing.

    Raises `EngineInterrupted` after the processes that were started within the block have ended. If the block has not ended
    `CLEAN_UP_S` after the signal, as in a library that drops the exception, these processes are killed and this one exits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, older = os.getpid(), frozenset(_children())
    timers: list[threading.Timer] = []
    received: list[int] = []

    def exit_now(number: int) -> None:
        _kill_children(older)
        os._exit(128 + number)

    def interrupt(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:
            # A fork of this process that has no handlers of its own yet.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not timers:
            timer = threading.Timer(CLEAN_UP_S, exit_now, (number,))
            timer.daemon = True
            timers.append(timer)
            received.append(number)
            timer.start()
            raise _Interrupted
        elif number == signal.SIGINT:
            exit_now(number)

    replaced = {
        number: signal.signal(number, interrupt)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    except BaseException:
        # Whatever the library made of the interruption.
        if not timers:
            raise
    finally:
        if timers:
            _kill_children(older)
        for timer in timers:
            timer.cancel()
        for number, handler in replaced.items():
            signal.signal(number, handler)
    if timers:
        # Also where the library dropped the exception.
        raise EngineInterrupted(received[0])


def _children() -> list[int]:
    """All processes below this one, but not the one that frees what the others leave in shared memory."""
    import psutil

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child.pid for child in psutil.Process().children(recursive=True) if child.pid != tracker]


def _kill_children(older: frozenset[int]) -> None:
    """Kill all processes below this one that are not among `older`."""
    for pid in _children():
        if pid not in older:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    # Reaps those that Python started.
    for process in multiprocessing.active_children():
        if process.pid not in older:
            process.join()
