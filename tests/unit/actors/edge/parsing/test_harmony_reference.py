"""gpt-oss: our format against openai-harmony, which reads the recorded outputs by their token ids."""

from typing import Any

import pytest

from headwater.actors.edge.parsing.grammar import ParsedOutput
from tests.bench.parsers.recorded import load

REFUSED = {"vllm-malformed-headers", "bug-garbled-channel-commentary-question", "harmony-truncated-in-header"}
"""Outputs with malformed or unfinished headers: the reference raises."""

DIFFERENT = {"llamacpp-stray-commentary-header", "bug-garbled-channel-question-marks"}
"""Outputs with headers that are malformed and yet accepted: the reference takes another channel, or drops text."""


@pytest.fixture(scope="module")
def harmony() -> Any:
    reference = pytest.importorskip("openai_harmony")
    try:
        encoding = reference.load_harmony_encoding(reference.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:
        pytest.skip(f"this openai-harmony has no vocabulary of its own: {error}")
    return reference, encoding


def read_by_reference(harmony: Any, ids: list[int]) -> ParsedOutput:
    reference, encoding = harmony
    parser = reference.StreamableParser(encoding, role=reference.Role.ASSISTANT)
    for one in ids:
        parser.process(one)
    parser.process_eos()
    text, reasoning, calls = "", "", []
    for message in parser.messages:
        body = "".join(part.text for part in message.content)
        recipient = message.recipient or ""
        if recipient.startswith("functions."):
            calls.append((recipient.removeprefix("functions."), "", body, True))
        elif message.channel == "analysis" or recipient not in ("", "assistant"):
            reasoning += body
        else:
            text += body
    return ParsedOutput(text, reasoning, tuple(calls))  # type: ignore[arg-type]


def test_equals_openai_harmony(harmony: Any) -> None:
    equal, refused, different = 0, set(), set()
    for recorded in load():
        if recorded.tool_format != "harmony":
            continue
        name = recorded.fixture.id.partition("/")[2]
        ours = recorded.parse([recorded.fixture.raw_output])
        assert harmony[1].decode(recorded.fixture.output_token_ids) == recorded.fixture.raw_output
        try:
            theirs = read_by_reference(harmony, recorded.fixture.output_token_ids)
        except Exception:  # of a type that the library does not export
            refused.add(name)
            continue
        calls = tuple((*call[:3], True) for call in ours.calls)
        if (ours.text, ours.reasoning, calls) == (theirs.text, theirs.reasoning, theirs.calls):
            equal += 1
        else:
            different.add(name)
    assert (equal, refused, different) == (46, REFUSED, DIFFERENT)
