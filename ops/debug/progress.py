"""How far a command is that reads much: on standard error, on a terminal, once it takes long."""

import sys
import time
from types import TracebackType
from typing import Final, Self

QUIET_S: Final = 1.0
PERIOD_S: Final = 0.2


class Progress:
    """Positions `first` to `last` are read. A context: the line is removed at its end."""

    def __init__(self, what: str, first: int, last: int) -> None:
        self._what = what
        self._first = first
        self._last = last
        self._shows = sys.stderr.isatty()
        self._next_s = time.monotonic() + QUIET_S
        self._shown = False

    def at(self, position: int) -> None:
        """Show the position, if it is time to."""
        if not self._shows or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + PERIOD_S
        self._shown = True
        share = (position - self._first) / max(1, self._last - self._first)
        line = f"{self._what}: position {position:,} of {self._last:,} ({share:.0%})"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
