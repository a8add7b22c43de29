"""Notices code that blocks an event loop, from a thread, and says which: a call that does not return cannot say it itself.

A worker whose event loop is blocked neither renews its lease nor answers edges. What blocks it is a file, a line and a
function of the engine. Only time in which this thread runs counts: a process that was stopped blocked nothing.
"""

import asyncio
import sys
import threading
import traceback
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from headwater.schemas.clock import Clock, SystemClock

BLOCKED_S: Final = 1.0
"""Shorter than a lease lives after a renewal that was due: the message is in the log before the lease has lapsed."""

SAMPLES: Final = 8
"""Of the loop's stack within `BLOCKED_S`."""

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
        own = [one for one in stack if one.filename.startswith(self._folder)]
        if not own:
            return None
        at = own[-1]
        return LoopBlock(at.filename, at.lineno or 0, at.name, self._blocked_s)


def folder_of(kind: type) -> str:
    """The folder of a class's code, as a prefix of the paths of its files; "" for a class without a file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{Path(file).parent}/" if file else ""
