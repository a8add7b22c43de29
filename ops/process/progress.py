"""A line on standard error that says how far a command has got: only on a terminal, and only once it takes long."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

QUIET_S: Final = 1.5
"""A command that ends before has shown nothing."""

PERIOD_S: Final = 0.25


class Progress:
    """The line is written over itself, and is gone at the end of the block.

    `what` is being done, in units of `unit`.
    """

    def __init__(
        self,
        what: str,
        unit: str = "positions",
        *,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self._unit = unit
        self._stream = stream if stream is not None else sys.stderr
        self._now_s = now_s
        self._began_s = now_s()
        self._due_s = self._began_s + QUIET_S if self._stream.isatty() else float("inf")
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")

    def at(self, done: int, total: int) -> None:
        """So much of it is done."""
        now_s = self._now_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        share = min(1.0, done / total) if total > 0 else 0.0
        left = f", about {(now_s - self._began_s) * (1 / share - 1):.0f} s left" if share > 0.01 else ""
        self._write(f"{self.what}: {done:,} of {total:,} {self._unit} ({share:.0%}){left}")

    def _write(self, text: str) -> None:
        if text or self._width:
            end = "" if text else "\r"
            self._stream.write(f"\r{text.ljust(self._width)}{end}")
            self._stream.flush()
            self._width = len(text)
