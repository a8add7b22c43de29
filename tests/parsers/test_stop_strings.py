"""A stop string inside a call ends the answer, and the call that it cuts is not one that a client should run."""

import json
from random import Random

import pytest

from headwater.actors.edge.answer.choice import CallIds, ParsedChoiceWriter, StopStringMatcher
from headwater.actors.edge.parsing.selection import make_parser
from tests.parsers.answers import Answer, Call
from tests.parsers.hard_cases import TOOLS
from tests.parsers.writers import FIRST, WRITERS

STOP = "STOP"


class Characters:
    """A decoder to which each token is the number of a character."""

    def push(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))

    def flush(self) -> str:
        return ""


def written_by(name: str, *parts: str | tuple[Call, ...]) -> ParsedChoiceWriter:
    """A choice that has the text of a family's answer, up to its stop string if it has one."""
    writer = WRITERS[name]
    parser = make_parser(
        writer.tool_format,
        writer.reasoning_format,
        tools=TOOLS,
        starts_in_reasoning=False,
    )
    choice = ParsedChoiceWriter(
        0, StopStringMatcher(Characters(), [STOP]), None, parser, CallIds(lambda: "x", (), "chat")
    )
    for character in writer.write(Answer("", parts), Random(1)):
        choice.push((ord(character),), ())
    choice.finish()
    return choice


@pytest.mark.parametrize("name", FIRST.values())
def test_a_call_that_a_stop_string_cuts_is_no_reason_to_run_tools(name: str) -> None:
    choice = written_by(name, (Call("f", {"s": f"a {STOP} b"}),))
    assert choice.stopped
    end = choice.end("stop")
    assert (end.reason, end.stop) == ("stop", STOP)


@pytest.mark.parametrize("name", FIRST.values())
def test_what_is_whole_before_a_stop_string_is_run(name: str) -> None:
    choice = written_by(name, (Call("f", {"s": "a"}),), STOP)
    end = choice.end("stop")
    assert end.reason == "tool_calls"
    (call,) = choice.result(0, 0, end).calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"s": "a"})


@pytest.mark.parametrize("name", FIRST.values())
def test_a_call_that_the_limit_cuts_is_no_reason_to_run_tools(name: str) -> None:
    choice = written_by(name, (Call("f", {"s": f"a {STOP} b"}),))
    assert choice.end("length").reason == "length"
