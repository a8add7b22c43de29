"""Hard texts are read as they are meant, whole and in pieces."""

import pytest

from tests.parsers.answers import Reading
from tests.parsers.hard_cases import HARD_CASES, HardCase
from tests.parsers.held_out import HELD_OUT
from tests.parsers.judge import problem_of, read_written


def problem_of_case(case: HardCase, reading: Reading) -> str:
    """What is wrong with the reading of a hard text; "" for nothing."""
    items = reading.items
    unfinished = tuple(item.name for item in items if not isinstance(item, str) and not item.complete)
    if unfinished != case.unfinished:
        return f"calls without an end: {unfinished}, not {case.unfinished}"
    whole = tuple(item for item in items if isinstance(item, str) or item.complete)
    return problem_of(case.written, reading._replace(items=whole))


def check(case: HardCase) -> None:
    """Whole, in pieces of one character, and of three."""
    whole = read_written(case.written)
    problem = problem_of_case(case, whole)
    assert not problem, f"{problem}\ntext: {case.text!r}\nread: {whole}"
    for size in (1, 3):
        pieces = [case.text[at : at + size] for at in range(0, len(case.text), size)]
        assert read_written(case.written, pieces) == whole


UNREAD = {
    "mistral: no arguments": "at the answer's end a call without arguments looks like one that is cut off before them"
}
"""Cases that are read as something else, and why."""

HELD_OUT_UNREAD = frozenset(
    {
        *("gemma4: the turn's end closes the call", "gemma4: no opening marker behind reasoning", "gemma4: a colon too many"),
        *("kimi_k2: a number in place of a name", "kimi_k2: a number in place of a name, of several", "kimi_k2: words in the section"),
        *("lfm2: JSON in place of Python", "lfm2: JSON with parameters", "lfm2: one object", "lfm2: quotes in quotes"),
        "lfm2: nothing between the markers",
    }
)  # fmt: skip
"""Held out cases that are not read as the suites of vLLM and SGLang want it. Nothing was tuned to any of them."""


def name_of(case: HardCase) -> str:
    return f"{case.family}: {case.name}"


@pytest.mark.parametrize("case", HARD_CASES, ids=name_of)
def test_hard_case(case: HardCase) -> None:
    if reason := UNREAD.get(name_of(case)):
        assert problem_of_case(case, read_written(case.written)), f"is read now: {reason}"
    else:
        check(case)


@pytest.mark.parametrize("case", HELD_OUT, ids=name_of)
def test_held_out(case: HardCase) -> None:
    if name_of(case) in HELD_OUT_UNREAD:
        assert problem_of_case(case, read_written(case.written))
    else:
        check(case)
