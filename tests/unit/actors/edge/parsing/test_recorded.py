"""The recorded outputs of real models: pass rates, and every failure named in the documentation."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.bench.parsers.judge import Verdict, judge
from tests.bench.parsers.recorded import load, tokens_of

PAGE = Path("docs/benchmarks/parsers.md")


@cache
def verdicts() -> tuple[Verdict, ...]:
    return tuple(judge(recorded) for recorded in load())


def test_all_outputs_are_there() -> None:
    assert len(load()) == 469
    assert 200 < sum(one.held_out for one in load()) < 270
    text = load()[0].fixture.raw_output
    assert "".join(tokens_of(text)) == text


def test_results_do_not_depend_on_cuts() -> None:
    assert [(one.recorded.fixture.id, one.cut) for one in verdicts() if one.cut] == []


def test_nine_of_ten_pass_in_every_family() -> None:
    families = Counter(one.recorded.fixture.family for one in verdicts())
    passed = Counter(one.recorded.fixture.family for one in verdicts() if one.status == "pass")
    assert {family for family in families if passed[family] < 0.9 * families[family]} == set()
    assert sum(passed.values()) >= 442


def test_the_page_explains_every_failure_and_no_other() -> None:
    failed = {one.recorded.fixture.id for one in verdicts() if one.status != "pass"}
    explained = set(re.findall(r"^\| `([\w.-]+/[\w.-]+)` \|", PAGE.read_text(), re.MULTILINE))
    assert explained == failed


FIRST_OF_TWO = "llama/l4-truncated-missing-close-bracket"
"""Its first call is whole, its second is cut off; the package wants neither."""


def test_calls_that_end_are_the_expected_ones() -> None:
    """A client that waits for the end of calls never sees one that is cut off or malformed."""
    for one in verdicts():
        if one.recorded.fixture.id == FIRST_OF_TWO:
            continue
        parsed = one.recorded.parse([one.recorded.fixture.raw_output])
        expected = one.recorded.fixture.expected
        whole = [call for call in parsed.calls if call.complete]
        if expected is not None:
            assert len(whole) == len(expected.tool_calls), one.recorded.fixture.id
        else:
            assert not whole, one.recorded.fixture.id
