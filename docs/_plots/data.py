"""What is plotted: figures as a page states them, in `docs/benchmarks/data/*.json`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headwater.ops.bench import plot

DOCS = Path(__file__).resolve().parent.parent
FOLDER = DOCS / "benchmarks" / "data"


class Row(plot.Row, frozen=True, kw_only=True):
    """One value of each series, null where the page has none, and as the page prints them."""

    lines: list[str]
    """Where on the page: a text in the line, after "…" one in a later line. One for all values, or one for each."""


class Panel(plot.Panel, frozen=True, kw_only=True):
    """One pair of axes."""

    rows: Sequence[Row]


class Plot(plot.Plot, frozen=True, kw_only=True):
    """One picture."""

    page: str
    """In `docs`."""
    section: str
    """The heading on the page above the figures."""
    panels: Sequence[Panel]
    command: str = ""
    """What printed them, where the page names it."""


def plots() -> dict[str, Plot]:
    """By the name of the picture."""
    return {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Plot) for path in sorted(FOLDER.glob("*.json"))
    }
