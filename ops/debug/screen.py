"""A terminal that shows text which is replaced again and again, with plain ANSI sequences."""

import shutil
import sys
from types import TracebackType
from typing import Final, Self, TextIO

ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The alternate screen, without a cursor: what was on the terminal comes back at the end."""

LEAVE: Final = "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """A context, at whose end, however it comes, the terminal is as it was."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out

    def __enter__(self) -> Self:
        self._out.write(ENTER)
        self._out.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.write(LEAVE)
        self._out.flush()

    def show(self, text: str) -> None:
        """Replace what is shown; what does not fit is cut, and the last line says so."""
        columns, rows = shutil.get_terminal_size()
        lines = text.splitlines()
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"… and {len(lines) - rows + 1} more"]
        shown = f"{REST_OF_LINE}\r\n".join([line[:columns] for line in lines])
        self._out.write(f"{HOME}{shown}{REST_OF_LINE}{REST_OF_SCREEN}")
        self._out.flush()
