"""Forms of single families that none of the writers of `tests/parsers` writes, and rules for what only looks like a call."""

import json
from random import Random
from typing import Any, NamedTuple

import pytest

from headwater.actors.edge.parsing.grammar import ParsedOutput, ToolArgumentsDelta, ToolCallStart
from headwater.actors.edge.parsing.selection import make_parser
from tests.parsers.answers import Answer, Call
from tests.parsers.hard_cases import tool
from tests.parsers.writers import FIRST, WRITERS
from tests.unit.actors.edge.parsing.support import parse

TOOLS = [
    tool("f", s={"type": "string"}, n={"type": "integer"}, o={"type": "object"}),
    tool("g", a={"type": "array"}),
]


class Family(NamedTuple):
    """An answer with reasoning, text and two calls; what of them each format has."""

    answer: str
    tool_format: str
    reasoning_format: str = ""
    reasoning: str = ""


F = '{"name": "f", "arguments": {"s": "a", "n": 3}}'
G = '{"name": "g", "arguments": {"a": ["x"]}}'

_IFM = (
    "<ifm|tool_call>f\n<ifm|arg_key>s</ifm|arg_key>\n<ifm|arg_value>a</ifm|arg_value>\n"
    "<ifm|arg_key>n</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type><ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n"
)

FAMILIES: dict[str, Family] = {
    "dots": Family(
        'Looking.\n<dots_function_call>\n<invoke name="f">\n<parameter name="s">a</parameter>\n'
        "<parameter name=n>3</parameter>\n</invoke>\n<invoke name=g>\n"
        '<parameter name="a">["x"]</parameter>\n</invoke>\n</dots_function_call>',
        "dots",
    ),
    "functiongemma": Family(
        "Looking.<start_function_call>call:f{n:3,s:<escape>a<escape>}<end_function_call>"
        "<start_function_call>call:g{a:[<escape>x<escape>]}<end_function_call><start_function_response>",
        "functiongemma",
    ),
    "granite 3.2": Family(
        f"Here is my thought process: hm Here is my response: Looking.\n<tool_call>[{F}, {G}]",
        "granite",
        "granite",
        reasoning="hm",
    ),
    "hunyuan a13b": Family(
        f"<think>\nhm\n</think>\n<answer>\nLooking.\n<tool_calls>[{F}, {G}]</tool_calls>\n</answer>",
        "jamba",
        "hunyuan_a13b",
        reasoning="hm",
    ),
    "ernie 4.5": Family(
        f"<think>\nhm\n</think>\n\n<response>\nLooking.\n</response>\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n",
        "hermes",
        "ernie45",
        reasoning="hm",
    ),
    "k2 horizon": Family(
        "<ifm|think_fast>\nhm\n</ifm|think_fast>\nLooking.\n<ifm|tool_calls>\n"
        f"{_IFM}<ifm|tool_call>{G}</ifm|tool_call>\n</ifm|tool_calls>",
        "k2_horizon",
        "k2_horizon",
        reasoning="hm",
    ),
    "xlam, as mistral": Family(f"Looking.\n[TOOL_CALLS][{F}, {G}]", "xlam"),
    "xlam, as hermes": Family(f"Looking.\n<tool_call>[{F}, {G}]</tool_call>", "xlam"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_the_family(name: str) -> None:
    family = FAMILIES[name]
    parsed = parse(family.answer, family.tool_format, family.reasoning_format, tools=TOOLS)
    assert (parsed.text, parsed.reasoning) == ("Looking.", family.reasoning)
    assert [(call.name, json.loads(call.arguments), call.complete) for call in parsed.calls] == [
        ("f", {"s": "a", "n": 3}, True),
        ("g", {"a": ["x"]}, True),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_cut_off(name: str) -> None:
    """Wherever it is: nothing raises, and a call that ended had its whole arguments."""
    family = FAMILIES[name]
    wanted: list[Any] = [("f", {"s": "a", "n": 3}), ("g", {"a": ["x"]})]
    for end in range(0, len(family.answer), 7):
        parsed = parse(family.answer[:end], family.tool_format, family.reasoning_format, tools=TOOLS)
        ended = [(call.name, json.loads(call.arguments)) for call in parsed.calls if call.complete]
        assert ended == wanted[: len(ended)]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("phi4_mini_json", "import functools, then functools[0] or functools"),
        ("xlam", '[1] and [link](url) and [{"a": 1}, 2] and ['),
        ("xlam", "```json\n[1, 2]\n```\nand ```python\nx = [f]\n```"),
        ("xlam", '[{"name": "other", "arguments": {}}]'),
        ("apertus", "<|tools_prefix|>no list"),
        ("apertus", '<|tools_prefix|>[{"f": 1}] and'),
        ("cohere_command", '<|START_ACTION|>[{"name": "f", "parameters": {}}] and'),
        ("lfm2", "<|tool_call_start|> opens calls"),
        ("gigachat3", "a function call is a call"),
        ("step3", "<steptml:other>"),
    ],
)
def test_what_is_no_call_is_text(tool_format: str, text: str) -> None:
    assert parse(text, tool_format, tools=TOOLS) == ParsedOutput(text, "", ())


def test_reasoning_alone() -> None:
    for text, reasoning_format in (
        ("<|inner_prefix|>hm<|inner_suffix|>Hi", "apertus"),
        ("◁think▷hm◁/think▷Hi", "kimi"),
        ("Here's my thought process: hm\n\nHere's my response: Hi", "granite"),
        ("<think>\nhm\n</think>\n\n<response>\nHi\n</response>\n", "ernie45"),
        ("<think>\nhm\n</think>\n<answer>\nHi\n</answer>", "hunyuan_a13b"),
        ("<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>", "cohere_command"),
        ("<|START_THINKING|>hm<|START_RESPONSE|>Hi<|END_RESPONSE|>", "cohere_command"),
        ("<ifm|think>\nhm\n</ifm|think>\nHi", "k2_horizon"),
        ("<seed:think>\nhm\n</seed:think>\nHi", "seed_oss"),
        ("<|plamo:begin_think:plamo|>hm<|plamo:end_think:plamo|>Hi<|plamo:tag|>", "plamo3"),
    ):
        assert parse(text, "", reasoning_format) == ParsedOutput("Hi", "hm", ()), reasoning_format


def test_malformed_keyed_calls_are_passed_on_without_an_end() -> None:
    (call,) = parse('<|tools_prefix|>[{"f": {"s": x}}]<|tools_suffix|>', "apertus", tools=TOOLS).calls
    assert (call.name, call.complete) == ("f", False)
    one, two = parse('<|tools_prefix|>[{"f": {}}, {"g": {"a": [', "apertus", tools=TOOLS).calls
    assert (one.complete, two.complete) == (True, False)


@pytest.mark.parametrize(("tool_format", "family"), FIRST.items())
def test_arguments_are_streamed(tool_format: str, family: str) -> None:
    """A string argument reaches the client before the call is whole."""
    calls = (Call("f", {"s": "a", "n": 3}), Call("g", {"a": ["x"]}))
    answer = WRITERS[family].write(Answer("", (calls,)), Random(1))
    made = make_parser(tool_format, "", tools=TOOLS, starts_in_reasoning=False)
    events = [event for character in answer for event in made.push(character)]
    first = next(index for index, event in enumerate(events) if isinstance(event, ToolCallStart))
    pieces = [event for event in events[first:] if isinstance(event, ToolArgumentsDelta) and event.call == 0]
    assert len(pieces) > 2
