"""Compares the output of a command with the one that a page shows.

`…` stands for any text within a line, and alone on a line for any number of lines. Runs of blanks and of dashes match
runs of any length, since tables are as wide as their values. In a block marked `<!-- output: numbers vary -->` a number matches
any number, an id any id, and the arrow of `headwater explain` may be in front of another row.
"""

import re
from typing import Final

_NUMBER: Final = r"[+-]?\d[\d,.:+T-]*(?:e[+-]?\d+)?"
_PARTS: Final = re.compile(
    r"(?P<any>…)|(?P<blank>\s+)|(?P<dashes>-{2,})|(?P<id>\b[0-9a-f]{16,}\b)|(?P<number>[+-]?\d[\d,.:+T-]*)"
)


def matches(expected: str, actual: str, *, numbers_vary: bool) -> bool:
    """Does the output have the shape that the page shows?"""
    return re.fullmatch(_pattern(expected, numbers_vary), _lines(actual), re.DOTALL) is not None


def _lines(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.strip("\n").splitlines())


def _pattern(expected: str, numbers_vary: bool) -> str:
    pattern = ""
    for line in expected.strip("\n").splitlines():
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += _line(line.rstrip(), numbers_vary) + r"[^\S\n]*\n"
    return pattern


def _line(line: str, numbers_vary: bool) -> str:
    pattern, at = "", 0
    if numbers_vary and line.startswith(("->", "    ")):
        line, pattern = line[2:], "(?:->|  )"
    for part in _PARTS.finditer(line):
        pattern += re.escape(line[at : part.start()])
        at = part.end()
        if part["any"]:
            pattern += r"[^\n]*?"
        elif part["blank"]:
            pattern += r"[^\S\n]*"
        elif part["dashes"]:
            pattern += r"-{2,}"
        elif not numbers_vary:
            pattern += re.escape(part[0])
        elif part["id"]:
            pattern += r"[0-9a-f]+"
        else:
            pattern += _NUMBER
    return pattern + re.escape(line[at:])
