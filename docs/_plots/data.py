"""What is plotted: figures as a page states them, in `docs/benchmarks/data/*.json`."""

from pathlib import Path
from typing import Literal

import msgspec

DOCS = Path(__file__).resolve().parent.parent
FOLDER = DOCS / "benchmarks" / "data"


class Row(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One value of each series, null where the page has none."""

    label: str
    values: list[str | None]
    """As the page prints them; with the unit where it is another one than the panel's."""
    lines: list[str]
    """Where on the page: a text in the line, after "…" one in a later line. One for all values, or one for each."""
    of: str = ""
    """What the values are counts of; they are drawn as shares in percent."""


class Panel(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One pair of axes."""

    kind: Literal["bars", "dots", "lines"]
    title: str
    unit: str
    rows: list[Row]
    """Along the horizontal axis of `lines`, and from top to bottom in the others."""
    log: bool = False
    mark: float | None = None
    """A line at this value, such as at 1 among ratios."""
    x: str = ""
    """What the rows of `lines` are."""


class Plot(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One picture."""

    title: str
    page: str
    """In `docs`."""
    section: str
    """The heading on the page above the figures."""
    conditions: str
    """Shown below the title."""
    series: list[str]
    panels: list[Panel]
    command: str = ""
    """What printed them, where the page names it."""


def plots() -> dict[str, Plot]:
    """By the name of the picture."""
    return {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Plot) for path in sorted(FOLDER.glob("*.json"))
    }


def number(text: str, unit: str, of: str = "") -> float:
    """A value as the page prints it, in a panel's unit."""
    digits, _, own = text.partition(" ")
    value = float(digits.replace(",", ""))
    if of:
        return 100 * value / float(of.replace(",", ""))
    if own and own != unit:
        return value * {("s", "ms"): 1000}[own, unit]
    return value
