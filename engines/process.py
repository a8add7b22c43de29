"""The process of an engine: interruption of its load, the cause of its death, a blocked event loop, room on its stack, and its private folder.

Loading vLLM, SGLang or TensorRT-LLM blocks the thread of the event loop for seconds to minutes, or until it is killed if a node that it
waits for does not come: a handler of the event loop would run only after that.

To its client an engine says only that one of its processes died, and that the cause is in the log above. Here the process that
fails writes the cause into a file of the engine's own folder, and one that was killed is known by its exit code.

A worker whose event loop is blocked neither renews its lease nor answers edges. What blocks it is a file, a line and a
function of the engine. Only time in which this thread runs counts: a process that was stopped blocked nothing.

A process holds the lock of its folder until it ends, however it ends: a folder whose lock is free has no owner.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import structlog

from headwater.engines import logs
from headwater.schemas.clock import Clock, SystemClock

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


# The first cause of the death of an engine's processes.

VARIABLE: Final = "HEADWATER_FIRST_FAILURE"
"""Environment variable with the path of the file, for the engine's processes."""

TEXT_MAX: Final = 1_000


def prepare(folder: Path) -> str:
    """The path of the file, which the engine's processes find in their environment."""
    path = os.environ[VARIABLE] = str(folder / "first-failure")
    return path


def keep(logger: str, fatal: Sequence[str]) -> None:
    """Write the cause of death of one of the engine's processes: the first fatal exception that it logs. Called in that process.

    `fatal` are parts of what `logger` says, with the exception, before a process ends. Other logged exceptions are answers to calls.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    make = logging.getLogRecordFactory()

    def made(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        if record.levelno >= logging.ERROR and f"{record.name}.".startswith(f"{logger}."):
            _write_first(path, record, fatal)
        return record

    # No handler: the process configures its logging later, and that removes them.
    logging.setLogRecordFactory(made)


def _write_first(path: str, record: logging.LogRecord, fatal: Sequence[str]) -> None:
    """The exception is the record's, or the one that is handled while it is logged."""
    error = record.exc_info[1] if record.exc_info else sys.exc_info()[1]
    if error is None or not any(text in record.getMessage() for text in fatal):
        return
    # Another process was first, or the folder is gone.
    with contextlib.suppress(OSError), open(path, "x") as file:
        file.write(f"{type(error).__name__}: {error}"[:TEXT_MAX])


def read(path: str, processes: Iterable[Any]) -> str:
    """The first cause of the death of an engine with these child processes (`multiprocessing`), "" if it is not known."""
    try:
        return Path(path).read_text()
    except OSError:
        pass
    for process in processes:
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process {process.pid} was ended by {signal.Signals(-code).name}"
        if code:
            return f"its process {process.pid} ended with code {code}"
    return ""


# Detection of code that blocks an event loop, from a thread: a call that does not return reports nothing.

BLOCKED_S: Final = 1.0
"""Shorter than a lease lives after a renewal that was due: the message is in the log before the lease has lapsed."""

SAMPLES: Final = 8
"""Samples of the loop's stack within `BLOCKED_S`."""

_log = structlog.get_logger("headwater.engine")


class LoopBlock(NamedTuple):
    """A call that kept an event loop from running: the innermost frame of the engine's, and for how long."""

    file: str
    line: int
    function: str
    seconds: float


class LoopWatch:
    """Watches the running loop from `start` on. `blocks` are all so far; `folder` holds the engine's code, "" for any."""

    def __init__(
        self, engine: str, folder: str = "", *, blocked_s: float = BLOCKED_S, clock: Clock | None = None
    ) -> None:
        self.blocks: list[LoopBlock] = []
        self._engine = engine
        self._folder = folder
        self._blocked_s = blocked_s
        self._clock = clock or SystemClock()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ident = 0
        self._thread = threading.Thread(target=self._run, name=f"{engine} loop watch", daemon=True)

    def start(self) -> None:
        """Begin to watch the loop that this is called on."""
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """End. Does not wait for the thread."""
        self._stop.set()

    def _run(self) -> None:
        period_s = self._blocked_s / SAMPLES
        while not self._stop.wait(period_s):
            asked_s, beat = self._clock.monotonic_s(), threading.Event()
            try:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:
                # The loop is closed.
                return
            samples = 0
            where: LoopBlock | None = None
            while not beat.wait(period_s) and not self._stop.is_set():
                samples += 1
                if samples == SAMPLES:
                    where = self._place()
                    if where is not None:
                        _log.error("event_loop_blocked", engine=self._engine, **where._asdict())
            if where is not None:
                waited_s = round(self._clock.monotonic_s() - asked_s, 3)
                self.blocks.append(where._replace(seconds=waited_s))
                _log.warning("event_loop_released", engine=self._engine, **self.blocks[-1]._asdict())

    def _place(self) -> LoopBlock | None:
        """The engine's innermost frame on the loop's stack; None if the loop does not run any code of it."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return None
        stack = traceback.extract_stack(frame)
        own_frames = [
            frame_summary for frame_summary in stack if frame_summary.filename.startswith(self._folder)
        ]
        if not own_frames:
            return None
        at = own_frames[-1]
        return LoopBlock(at.filename, at.lineno or 0, at.name, self._blocked_s)


def folder_of(kind: type) -> str:
    """The folder of a class's code, as a prefix of the paths of its files; "" for a class without a file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{Path(file).parent}/" if file else ""


# Exclusion of objects that live as long as the process from garbage collection.

YOUNG_OBJECTS: Final = 10_000
"""More than an edge's requests in flight have. Python's own threshold is 700: a few requests."""


def freeze_heap() -> None:
    """Collect once, then exclude all existing objects from later collections.

    Call it once a process has loaded its modules and models. A full collection over the objects created by importing vLLM
    takes about 0.4 s, during which no token is sent; over those of the compiled kernels, 0.1 s.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Look for unreachable cycles only once many objects are left over, for a process whose requests leave none.

    A collection goes through the objects of all requests in flight, which it will not free: at 32 of them that took 4 % of an
    edge's time.
    """
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


# Room on Python's stack. A fork goes on with the stack of its parent.

STACK_ROOM: Final = 16_384
"""Slots of 8 bytes, eight times those of a chunk. Pages that are never written take no memory."""

P = ParamSpec("P")
T = TypeVar("T")


def with_stack_room(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called from a frame after which `STACK_ROOM` slots of Python's stack are free; processes forked in it have them too.

    The stack is a list of chunks of 16 KiB. In Python 3.11, 3.12 and early 3.13 a call at the end of a chunk gets a new one from the
    system and gives it back when it returns (CPython's issue 142183), so a loop at such a place pays for that with each call: 28 times
    in each step of a vLLM that replays a CUDA graph per layer, 2.2 of 7.6 ms. Whether a loop is at such a place follows from all frames
    before it, in a fork also from those of its parent. This frame is larger than a chunk: Python gives it a chunk of its own, in which
    the later frames stay.
    """

    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    code = called.__code__
    called.__code__ = code.replace(co_stacksize=code.co_stacksize + STACK_ROOM)
    return called


# Folders of one process for temporary files, which the next process removes if this one is killed.

LOCK: Final = "lock"
NAME: Final = "headwater-"


class _Lock(NamedTuple):
    """A lock that is held: by the process of this number, and not by its forks, which inherit it."""

    pid: int
    handle: int


_held: dict[Path, _Lock] = {}


def take(kind: str, parent: Path | None = None) -> Path:
    """A new folder of this process alone, `headwater-<kind>-…` in `parent` (default: the system's folder for temporary files).

    Removes those of the same kind that processes of this user have left.
    """
    where, prefix = parent or Path(tempfile.gettempdir()), f"{NAME}{kind}-"
    remove_leftovers(where, prefix)
    return make(where, prefix)


def make(parent: Path, prefix: str) -> Path:
    """A new, locked folder."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    # Locked before it has its name: between the two another process would take this folder for a leftover.
    unnamed = folder / f"{LOCK}.new"
    handle = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    unnamed.rename(folder / LOCK)
    _held[folder] = _Lock(os.getpid(), handle)
    return folder


def give_up(folder: Path) -> None:
    """Remove it. Again is fine."""
    lock = _held.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock.handle)


def is_private(folder: Path) -> bool:
    """Return whether this is the name of a private folder of any process."""
    return folder.name.startswith(NAME)


def pass_logs_on(variable: str, folder: Path, levels: Mapping[str, str]) -> bool:
    """Have an engine's own processes log as this one does: `variable` names the configuration that they read. Return whether they do.

    They do not if the operator has configured them. `folder` is private, and lives as long as they do.
    """
    present_config = os.environ.get(variable)
    if not logs.is_configured() or (present_config and not is_private(Path(present_config).parent)):
        return False
    os.environ[variable] = str(logs.write_config(folder, levels))
    return True


def is_own(folder: Path) -> bool:
    """Return whether this process itself, not one that it was forked from, took this folder."""
    lock = _held.get(folder)
    return lock is not None and lock.pid == os.getpid()


def give_up_own() -> None:
    """Remove all that this process took; those of the process that it was forked from stay."""
    for folder in [folder for folder in _held if is_own(folder)]:
        give_up(folder)


def remove_leftovers(parent: Path, prefix: str = "") -> list[str]:
    """Remove the folders of processes that are gone whose names begin with `prefix`; returns their names."""
    removed = []
    for entry in parent.iterdir():
        if not entry.name.startswith(prefix):
            continue
        try:
            handle = os.open(entry / LOCK, os.O_RDWR)
        except OSError:
            # One that is being made, another user's, or no folder of ours.
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry.name)
        finally:
            os.close(handle)
    return removed
