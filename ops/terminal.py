"""What commands read from and print to a terminal: tables, fields of documents, a line of progress, and times."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self, TextIO


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned: numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(header), *(len(row[i]) for row in cells)]) for i, header in enumerate(headers)]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headers))]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if flush else value.ljust(width)
            for value, width, flush in zip(values, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """Fields of a document that a value has under the same names."""
    return {name: getattr(value, name) for name in names}


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
        time_left = f", about {(now_s - self._began_s) * (1 / share - 1):.0f} s left" if share > 0.01 else ""
        self._write(f"{self.what}: {done:,} of {total:,} {self._unit} ({share:.0%}){time_left}")

    def _write(self, text: str) -> None:
        if text or self._width:
            end = "" if text else "\r"
            self._stream.write(f"\r{text.ljust(self._width)}{end}")
            self._stream.flush()
            self._width = len(text)


FORMS: Final = "an ISO 8601 time (2026-11-26T21:04:00Z), HH:MM[:SS] of today, seconds or milliseconds since 1970, or -5m (s, m, h, d)"
UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

_AGO: Final = re.compile(r"-(\d+(?:\.\d+)?)([smhd])")
_CLOCK: Final = re.compile(r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?")
_UNIX: Final = re.compile(r"\d{9,10}(?:\.\d+)?")
_UNIX_MS: Final = re.compile(r"\d{12,13}")


def time_ns(text: str, now_ns: int) -> int | None:
    """The time that a text names, in nanoseconds since the Unix epoch; None if it is none of `FORMS`.

    A time without an offset is in UTC. HH:MM that is still to come today is of yesterday.
    """
    text = text.strip()
    if match := _AGO.fullmatch(text):
        return now_ns - round(float(match[1]) * UNITS_S[match[2]] * 1_000_000_000)
    if _UNIX_MS.fullmatch(text):
        return int(text) * 1_000_000
    if _UNIX.fullmatch(text):
        return round(float(text) * 1_000_000_000)
    now = datetime.fromtimestamp(now_ns / 1e9, UTC)
    if _CLOCK.fullmatch(text):
        hours, _, rest = text.partition(":")
        text = f"{now:%Y-%m-%d}T{hours.rjust(2, '0')}:{rest}"
        moment = _parsed(text)
        if moment is not None and moment > now:
            moment = _parsed(f"{now - timedelta(days=1):%Y-%m-%d}T{text.partition('T')[2]}")
    else:
        moment = _parsed(text.removesuffix(" UTC") + "Z" if text.endswith(" UTC") else text)
    return None if moment is None else round(moment.timestamp() * 1_000_000) * 1_000


def _parsed(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if "-" not in text:
        # A bare number such as 20261126 is a date of ISO 8601, and more likely a position.
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def iso_time(wall_ns: int) -> str:
    """A time as ISO 8601 has it, to the millisecond, in UTC: 2026-11-26T21:05:00.000Z."""
    return (
        datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def utc_time(wall_ns: int) -> str:
    """A time for a line of text, to the millisecond: 2026-11-26 21:05:00.000 UTC."""
    return f"{datetime.fromtimestamp(wall_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S}.{wall_ns // 1_000_000 % 1000:03} UTC"
