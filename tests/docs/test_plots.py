"""The plots show what their pages say: the pictures are those of the data, and the data are on the pages."""

import re
import sys
from itertools import chain
from xml.etree import ElementTree

import pytest
from docs._plots.__main__ import FOLDER, main
from docs._plots.data import DOCS, Plot, Row, plots

from headwater.ops.bench.plot import number

PLOTS = plots()

_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?!\w)")

every_plot = pytest.mark.parametrize(("name", "plot"), PLOTS.items(), ids=PLOTS)


def _section(plot: Plot) -> list[str]:
    """Lines below the plot's heading, up to the next one that is no part of it."""
    lines = (DOCS / plot.page).read_text().splitlines()
    heading = next(line for line in lines if re.fullmatch(rf"#+ {re.escape(plot.section)}", line))
    below = lines[lines.index(heading) + 1 :]
    level = len(heading.split()[0])
    ends = [i for i, line in enumerate(below) if re.match(rf"#{{1,{level}}} ", line)]
    return below[: ends[0]] if ends else below


def _line(lines: list[str], where: str) -> str:
    """The first line with the text before "…", or from there on the first with what is behind it."""
    found = ""
    for text in where.split(" … "):
        at = next((i for i, line in enumerate(lines) if text in line), None)
        assert at is not None, where
        found, lines = lines[at], lines[at:]
    return found


def _has(line: str, digits: str) -> bool:
    return re.search(rf"(?<![\w.,]){re.escape(digits)}(?![\w]|[.,]\d)", line) is not None


def _rows(plot: Plot) -> list[Row]:
    return [row for panel in plot.panels for row in panel.rows]


def test_the_pictures_are_current(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["docs._plots", "--check"])
    assert main() == 0, capsys.readouterr().err


@every_plot
def test_every_value_is_in_its_line_of_the_page(name: str, plot: Plot) -> None:
    section = _section(plot)
    for row in _rows(plot):
        assert len(row.values) == len(plot.series)
        assert len(row.lines) in (1, len(plot.series))
        for i, value in enumerate(row.values):
            line = _line(section, row.lines[i if len(row.lines) > 1 else 0])
            for digits in [value.split()[0]] if value is not None else []:
                assert _has(line, digits), f"{digits} of {row.label} is not in: {line}"


@every_plot
def test_what_is_said_of_the_values_is_on_the_page(name: str, plot: Plot) -> None:
    """The command, and every number of the conditions and labels."""
    page = (DOCS / plot.page).read_text()
    assert plot.command in page
    texts = [plot.title, plot.conditions, *plot.series, *chain(*((r.label, r.of) for r in _rows(plot)))]
    numbers = set(chain.from_iterable(_NUMBER.findall(text) for text in texts))
    # Blocks of a worker are written without a comma in tables.
    assert not {n for n in numbers if not _has(page, n) and not _has(page, n.replace(",", ""))}


@every_plot
def test_the_page_shows_the_picture_and_says_what_is_in_it(name: str, plot: Plot) -> None:
    page = DOCS / plot.page
    shown = re.findall(rf"^!\[(.*)\]\((.*\b{name}\.svg)\)$", "\n".join(_section(plot)), re.MULTILINE)
    assert len(shown) == 1
    text, target = shown[0]
    assert (page.parent / target).resolve() == FOLDER / f"{name}.svg"
    assert len(text) > 40


@every_plot
def test_a_picture_needs_nothing_else(name: str, plot: Plot) -> None:
    text = (FOLDER / f"{name}.svg").read_text()
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("text", "unit", "of", "value"),
    [
        ("2,697", "tokens/s", "", 2697),
        (".325", "", "", 0.325),
        ("2.99 s", "ms", "", 2990),
        ("0.29 s", "s", "", 0.29),
        ("2,600", "%", "5,200", 50),
    ],
)
def test_numbers_are_read_as_pages_print_them(text: str, unit: str, of: str, value: float) -> None:
    assert number(text, unit, of) == pytest.approx(value)
