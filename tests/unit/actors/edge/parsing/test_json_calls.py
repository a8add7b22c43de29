"""Calls as JSON objects, with reasoning before them."""

import json

import msgspec
import pytest

from headwater.actors.edge.parsing.grammar import ParsedCall, ParsedOutput
from tests.parsers.hard_cases import tool
from tests.unit.actors.edge.parsing.support import parse


def call(name: str, arguments: str, *, complete: bool = True, call_id: str = "") -> ParsedCall:
    return ParsedCall(name, call_id, arguments, complete)


def test_reasoning_text_and_calls() -> None:
    text = (
        "<think>\nhm\n</think>\n\nHi\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>", "y": [1, 2.5e3, true, null]}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n'
    )
    calls = (call("f", '{"x": "</tool_call>", "y": [1, 2.5e3, true, null]}'), call("g", "{}"))
    assert parse(text, "hermes", "think") == ParsedOutput("Hi", "hm", calls)


@pytest.mark.parametrize(
    "text",
    [
        "Hello\n",
        "a < b <thin",
        "<tool_call> marks a call",
        "the tag <think> opens reasoning, </think> closes it",
        '<tool_call>{"no": "name"}',
        "<tool_call>[1, 2] and more",
    ],
)
def test_text_that_is_no_call_is_kept(text: str) -> None:
    assert parse(text, "hermes", "think") == ParsedOutput(text, "", ())


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
        ('{"name": "f", "arguments": {"a": "\\d"}}', '{"a": "\\\\d"}'),
        ('{"name": "f", "arguments": {"a": [True, None]}}', '{"a": [true, null]}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ],
)
def test_forms_of_a_call(body: str, arguments: str) -> None:
    parsed = parse(f"<tool_call>\n{body}\n</tool_call>", "hermes")
    assert parsed == ParsedOutput("", "", (call("f", arguments),))
    json.loads(parsed.calls[0].arguments)


def test_call_that_is_cut_off_has_no_end() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Par'
    assert parse(text, "hermes") == ParsedOutput("", "", (call("f", '{"city": "Par', complete=False),))
    assert parse(text[:30], "hermes") == ParsedOutput("", "", ())


def test_arguments_that_are_not_json_are_passed_on_without_an_end() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"city": Paris}}\n</tool_call>\nDone'
    assert parse(text, "hermes") == ParsedOutput(
        "\nDone", "", (call("f", '{"city": Paris}}\n', complete=False),)
    )


def test_bare_objects_are_calls_of_offered_tools_only() -> None:
    tools = [tool("f")]
    two = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}'
    assert parse(two, "llama3_json", tools=tools).calls == (call("f", '{"a": 1}'), call("f", '{"a": 2}'))
    tagged = '<|python_tag|>{"type": "function", "name": "g", "parameters": {}}'
    assert parse(tagged, "llama3_json", tools=tools).calls == (call("g", "{}"),)
    for text in (
        '{"name": "g", "parameters": {}}',
        '{"a": {"name": "f", "parameters": {}}} and more',
        '{"parameters": {}}',
        "use {x} or {",
    ):
        assert parse(text, "llama3_json", tools=tools) == ParsedOutput(text, "", ())


def test_forced_calls() -> None:
    tools = [tool("f")]
    array = '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]'
    calls = (call("f", '{"a": 1}'), call("f", "{}"))
    assert parse(array, "forced_calls", tools=tools) == ParsedOutput("", "", calls)
    assert parse(f"<think>a</think>\n{array}\n", "forced_calls", "think", tools=tools) == ParsedOutput(
        "", "a", calls
    )
    assert parse('{"a": 1}\n', "forced_call", tools=tools) == ParsedOutput("", "", (call("f", '{"a": 1}'),))
    assert parse('{"a": ', "forced_call", tools=tools).calls == (call("f", '{"a": ', complete=False),)
    for text in ("no", " ", ""):
        assert parse(text, "forced_call", tools=tools) == ParsedOutput(text, "", ())
        assert parse(text, "forced_calls", tools=tools) == ParsedOutput(text, "", ())


def test_what_is_not_parsed_stays_text() -> None:
    text = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text, "hermes") == ParsedOutput("<think>a</think>", "", (call("f", "{}"),))
    assert parse(text, "", "think") == ParsedOutput(text[16:], "a", ())
    assert parse(text, "", "") == ParsedOutput(text, "", ())


def test_reasoning_that_the_prompt_opened() -> None:
    assert parse("hm\n</think>\n\nHi", "", "think", inside=True) == ParsedOutput("Hi", "hm", ())
    assert parse("<think>\nhm</think>Hi", "", "think", inside=True) == ParsedOutput("Hi", "hm", ())
    assert parse("hm", "", "think", inside=True) == ParsedOutput("", "hm", ())
    assert parse("hm</think>Hi", "", inside=True).text == "hm</think>Hi"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"a\ud800b", "a\ufffdb"),
        (r"\ud83d\ude42", "🙂"),
        (r"\ude42\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude42", "\ufffd🙂"),
        (r"\ud83d", "\ufffd"),
    ],
)
def test_half_of_a_surrogate_pair_is_no_character(written: str, read: str) -> None:
    """A client could not read the arguments otherwise; whole and in pieces they are the same."""
    for form, text in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "' + written + '"}}\n</tool_call>'),
        ("pythonic", f'[f(s="{written}")]'),
    ):
        (call,) = parse(text, form, tools=[tool("f")]).calls
        assert call.complete
        assert msgspec.json.decode(call.arguments) == {"s": read}
