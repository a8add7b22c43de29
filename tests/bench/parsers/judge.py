"""Judging parses of recorded outputs by the rules of the package that they come from."""

from typing import TYPE_CHECKING, NamedTuple

from headwater.actors.edge.parsing.grammar import ParsedOutput
from tests.bench.parsers.recorded import RecordedOutput, cuts_of

if TYPE_CHECKING:
    from canitoolcall.results import ParseResult


class Verdict(NamedTuple):
    """What came of one output. `status` is pass, soft_pass (whitespace differs) or fail. `cut` names a way of cutting it that gave another result than the whole; "" if none."""

    recorded: RecordedOutput
    status: str
    reasons: tuple[str, ...]
    cut: str


def judge(recorded: RecordedOutput) -> Verdict:
    """Parse an output whole and in every cut, and compare it with the expected result.

    A call that began counts as made, even if it has no end: a client of a stream has seen it.
    """
    from canitoolcall.checks import case_status, run_checks
    from canitoolcall.results import Observation, Status

    text = recorded.fixture.raw_output
    whole = recorded.parse([text])
    cut = next((name for name, pieces in cuts_of(text) if recorded.parse(pieces) != whole), "")
    result = _result(whole)
    rows = run_checks(
        recorded.fixture, recorded.family, Observation(nonstream=result, streams={"token": result})
    )
    reasons = tuple(
        f"{row.check}: {row.detail}"
        for row in rows
        if row.status is not Status.PASS and row.strategy == "nonstream"
    )
    return Verdict(recorded, case_status(rows).value, reasons, cut)


def _result(parsed: ParsedOutput) -> "ParseResult":
    from canitoolcall.results import ParsedToolCall, ParseResult

    return ParseResult(
        content=parsed.text or None,
        reasoning_content=parsed.reasoning or None,
        tool_calls=tuple(ParsedToolCall(call.name, call.arguments) for call in parsed.calls),
    )
