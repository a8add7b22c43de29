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


@pytest.mark.parametrize("case", HARD_CASES, ids=lambda case: f"{case.family}: {case.name}")
def test_hard_case(case: HardCase) -> None:
    check(case)


@pytest.mark.parametrize("case", HELD_OUT, ids=lambda case: f"{case.family}: {case.name}")
def test_held_out(case: HardCase) -> None:
    check(case)
