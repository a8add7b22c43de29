"""A plot as SVG: plain shapes and text, nothing from elsewhere, and the same bytes for the same data."""

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Literal

import msgspec


class Row(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One value of each series as text, with the unit where it is another one than the panel's; None where there is none."""

    label: str
    values: list[str | None]
    of: str = ""
    """What the values are counts of; they are drawn as shares in percent."""


class Panel(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One pair of axes."""

    kind: Literal["bars", "dots", "lines"]
    title: str
    unit: str
    rows: Sequence[Row]
    """Along the horizontal axis of `lines`, and from top to bottom in the others."""
    log: bool = False
    mark: float | None = None
    """A line at this value, such as at 1 among ratios."""
    x: str = ""
    """What the rows of `lines` are."""
    series: Sequence[str] = ()
    """Names of its series, where they are not those of the plot."""


class Plot(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One picture. `conditions` are shown below its title."""

    title: str
    conditions: str
    series: Sequence[str]
    panels: Sequence[Panel]


def number(text: str, unit: str, of: str = "") -> float:
    """A value as text, in a panel's unit."""
    digits, _, text_unit = text.partition(" ")
    value = float(digits.replace(",", ""))
    if of:
        return 100 * value / float(of.replace(",", ""))
    if text_unit and text_unit != unit:
        return value * {("s", "ms"): 1000}[text_unit, unit]
    return value


WIDTH, MARGIN = 600, 20
TEXT, BOLD = 16, 19
_STYLE = """
.card { fill: #ffffff; stroke: #d5dbe1; }
.t { fill: #16202b; } .s { fill: #4a5866; }
.grid { stroke: #e1e6eb; } .mark { stroke: #4a5866; stroke-dasharray: 5 4; }
.f0 { fill: #1f5f99; } .f1 { fill: #c2571a; } .f2 { fill: #75808b; }
.l0 { stroke: #1f5f99; } .l1 { stroke: #c2571a; stroke-dasharray: 9 4; } .l2 { stroke: #75808b; stroke-dasharray: 3 4; }
@media (prefers-color-scheme: dark) {
.card { fill: #14181d; stroke: #333c46; }
.t { fill: #e8edf2; } .s { fill: #aab6c2; }
.grid { stroke: #2b333c; } .mark { stroke: #aab6c2; }
.f0 { fill: #6fb1ee; } .f1 { fill: #ff9a6b; } .f2 { fill: #98a4af; }
.l0 { stroke: #6fb1ee; } .l1 { stroke: #ff9a6b; } .l2 { stroke: #98a4af; }
}
"""


def svg(plot: Plot) -> str:
    """The whole picture."""
    page = _Page()
    page.paragraph(plot.title, "t", BOLD, "600")
    page.paragraph(plot.conditions, "s", TEXT - 2)
    page.legend(plot.series)
    for panel in plot.panels:
        page.paragraph(panel.title, "t", TEXT, "600")
        page.legend(panel.series)
        {"bars": page.bars, "dots": page.dots, "lines": page.lines}[panel.kind](panel)
    return page.text(plot.title)


class _Axis:
    """Values to pixels between `start` and `end`."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        self._log, self._start, self._end = log, start, end
        self.ticks = _log_ticks(values) if log else _ticks(max(values))

    def __call__(self, value: float) -> float:
        low, high, at = self.ticks[0], self.ticks[-1], value
        if self._log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self._start + (at - low) / (high - low) * (self._end - self._start)


def _ticks(largest: float) -> list[float]:
    """From 0 in even steps, four to six of them."""
    rough = largest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [round(step * i, 10) for i in range(math.ceil(largest / step * 0.999) + 1)]


def _log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 of each power of ten around the values, or the powers alone."""
    powers = range(math.floor(math.log10(min(values))), math.floor(math.log10(max(values))) + 2)
    ticks = [round(factor * 10.0**power, 10) for power in powers for factor in (1, 2, 5)]
    low = max(i for i, tick in enumerate(ticks) if tick <= min(values))
    high = min(i for i, tick in enumerate(ticks) if tick >= max(values))
    ticks = ticks[low : high + 1]
    powers_of_ten = [tick for tick in ticks if math.log10(tick).is_integer()]
    return ticks if len(ticks) <= 8 else sorted({ticks[0], *powers_of_ten, ticks[-1]})


def _numbers(panel: Panel) -> list[list[float | None]]:
    return [[_value(text, panel, row) for text in row.values] for row in panel.rows]


def _value(text: str | None, panel: Panel, row: Row) -> float | None:
    return None if text is None else number(text, panel.unit, row.of)


class _Page:
    """Written from top to bottom."""

    def __init__(self) -> None:
        self._y = 12.0
        self._parts: list[str] = []

    def text(self, title: str) -> str:
        height = round(self._y + 8)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="{TEXT}">'
        )
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        return "\n".join([head, f"<style>{_STYLE}</style>", card, *self._parts, "</svg>"]) + "\n"

    def paragraph(self, text: str, style: str, size: int, weight: str = "400") -> None:
        for line in textwrap.wrap(
            text, int((WIDTH - 2 * MARGIN) / (size * (0.62 if weight == "600" else 0.56)))
        ):
            self._y += size * 1.35
            self._text(MARGIN, self._y, line, style, size=size, weight=weight)
        self._y += 8

    def legend(self, series: Sequence[str]) -> None:
        if len(series) < 2:
            return
        x, self._y = float(MARGIN), self._y + 14
        for i, name in enumerate(series):
            wide = 40 + len(name) * TEXT * 0.58
            if x > MARGIN and x + wide > WIDTH - MARGIN:
                x, self._y = float(MARGIN), self._y + 24
            self._dot(x + 7, self._y, i)
            self._text(x + 20, self._y + 5.5, name, "t")
            x += wide
        self._y += 18

    def bars(self, panel: Panel) -> None:
        rows = _numbers(panel)
        axis = _Axis(
            [v for row in rows for v in row if v is not None], panel.log, MARGIN, WIDTH - MARGIN - 130
        )
        for row, values in zip(panel.rows, rows):
            self._text(MARGIN, self._y + 14, row.label, "s", size=TEXT - 1)
            self._y += 20
            for i, value in enumerate(values):
                if value is None:
                    continue
                wide = max(axis(value) - MARGIN, 1.5)
                self._add(
                    f'<rect class="f{i}" x="{MARGIN}" y="{self._y:.1f}" width="{wide:.1f}" height="17"/>'
                )
                self._text(MARGIN + wide + 6, self._y + 14, _shown(row, i, panel.unit), "t", size=TEXT - 1)
                self._y += 20
            self._y += 6
        self._y += 6

    def dots(self, panel: Panel) -> None:
        rows = _numbers(panel)
        left = MARGIN + 12 + max(len(row.label) for row in panel.rows) * (TEXT - 1) * 0.58
        values = [v for row in rows for v in row if v is not None]
        axis = _Axis(
            values if panel.mark is None else [*values, panel.mark], panel.log, left, WIDTH - MARGIN - 14
        )
        top, step = self._y + 4, 24
        bottom = top + step * len(rows)
        for tick in axis.ticks:
            self._line(axis(tick), top, axis(tick), bottom, "grid")
            self._text(axis(tick), bottom + 18, f"{tick:,.10g}", "s", "middle", TEXT - 2)
        if panel.mark is not None:
            self._line(axis(panel.mark), top, axis(panel.mark), bottom, "mark")
        for i, row in enumerate(panel.rows):
            y = top + step * (i + 0.5)
            self._text(left - 12, y + 5, row.label, "s", "end", TEXT - 1)
            self._line(left, y, WIDTH - MARGIN - 14, y, "grid")
            # One slightly below the other, so that equal values are seen; the first is drawn last.
            for j, value in reversed(list(enumerate(rows[i]))):
                if value is not None:
                    self._dot(axis(value), y + 5 * (j - (len(rows[i]) - 1) / 2), j)
        self._y = bottom + 20
        self._text((left + WIDTH - MARGIN - 14) / 2, self._y + 16, panel.unit, "s", "middle", TEXT - 2)
        self._y += 30

    def lines(self, panel: Panel) -> None:
        rows = _numbers(panel)
        left, right = MARGIN + 58.0, WIDTH - MARGIN - 24.0
        top, bottom = self._y + 8, self._y + 218
        axis = _Axis([v for row in rows for v in row if v is not None], panel.log, bottom, top)
        for tick in axis.ticks:
            self._line(left, axis(tick), right, axis(tick), "grid")
            self._text(left - 8, axis(tick) + 5, f"{tick:,.10g}", "s", "end", TEXT - 2)
        xs = [left + 16 + (right - left - 32) * i / (len(rows) - 1) for i in range(len(rows))]
        for x, row in zip(xs, panel.rows):
            self._text(x, bottom + 20, row.label, "s", "middle", TEXT - 2)
        for j in reversed(range(len(rows[0]))):
            at = [(x, axis(v)) for x, row in zip(xs, rows) if (v := row[j]) is not None]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            self._add(f'<polyline class="l{j}" points="{points}" fill="none" stroke-width="2.5"/>')
            for x, y in at:
                self._dot(x, y, j)
        self._text((left + right) / 2, bottom + 40, panel.x, "s", "middle", TEXT - 2)
        self._y = bottom + 54

    def _dot(self, x: float, y: float, series: int) -> None:
        """A shape for each series: not all readers tell the colours apart."""
        r = 5
        outline = {
            0: f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
            1: f"M{x - r + 1:.1f} {y - r + 1:.1f}h{2 * r - 2}v{2 * r - 2}h{2 - 2 * r}z",
            2: f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z",
        }
        self._add(f'<path class="f{series}" d="{outline[series]}"/>')

    def _line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self._add(f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        style: str,
        anchor: str = "start",
        size: int = TEXT,
        weight: str = "400",
    ) -> None:
        self._add(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}">{escape(text, quote=False)}</text>'
        )

    def _add(self, part: str) -> None:
        self._parts.append(part)


def _shown(row: Row, series: int, unit: str) -> str:
    text = row.values[series] or ""
    if row.of:
        return f"{text} of {row.of}"
    return text if " " in text or not unit else f"{text} {unit}"
