"""Compares the output of a command with the one that a page shows.

`…` stands for any text within a line, and alone on a line for any number of lines. Runs of blanks and of dashes match
runs of any length, since tables are as wide as their values. In a block marked `<!-- output: numbers vary -->` a number matches
any number, an id any id, and the arrow of `headwater explain` may be in front of another row.
"""

import re
from typing import Final

# Possessive, so that a line that does not match takes no exponential time.
_NUMBER: Final = r"[+-]?\d[\d,.:+T-]*+(?:e[+-]?\d++)?+"
_PARTS: Final = re.compile(
    r"(?P<any>…)|(?P<blank>\s+)|(?P<dashes>-{2,})|(?P<id>\b[0-9a-f]{16,}\b)|(?P<number>(?:(?<!\w)[+-])?\d[\d,.:+T-]*)"
)


def matches(expected: str, actual: str, *, numbers_vary: bool) -> bool:
    """Does the output have the shape that the page shows?"""
    wanted = [
        None if line.strip() == "…" else re.compile(_line(line.rstrip(), numbers_vary) + r"\s*")
        for line in expected.strip("\n").splitlines()
    ]
    # Where in `wanted` the lines so far may have led, `None` standing for any number of lines.
    reached = _past_ellipses({0}, wanted)
    for line in actual.strip("\n").splitlines():
        after = {at for at in reached if at < len(wanted) and wanted[at] is None}
        for at in reached - after:
            pattern = wanted[at] if at < len(wanted) else None
            if pattern is not None and pattern.fullmatch(line):
                after.add(at + 1)
        reached = _past_ellipses(after, wanted)
    return len(wanted) in reached


def _past_ellipses(reached: set[int], wanted: list[re.Pattern[str] | None]) -> set[int]:
    """These places, and those behind an ellipsis that matches no further line."""
    found = set(reached)
    for at in sorted(reached):
        while at < len(wanted) and wanted[at] is None:
            at += 1
            found.add(at)
    return found


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
            pattern += r"[^\S\n]*+"
        elif part["dashes"]:
            pattern += r"-{2,}+"
        elif not numbers_vary:
            pattern += re.escape(part[0])
        elif part["id"]:
            pattern += r"[0-9a-f]++"
        else:
            pattern += _NUMBER
    return pattern + re.escape(line[at:])
