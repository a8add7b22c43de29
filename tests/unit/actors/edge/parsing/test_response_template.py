"""Templates that models bring themselves, against Hugging Face's own parser of them."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.parsing.grammar import ParsedOutput
from headwater.actors.edge.parsing.response_template import InvalidTemplate, load_response_template
from headwater.actors.edge.parsing.selection import (
    RESPONSE_TEMPLATE,
    MissingFormat,
    make_parser,
    starts_in_reasoning,
)
from tests.parsers.hard_cases import tool
from tests.unit.actors.edge.parsing.support import parse_pieces

CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}

JSON_CALLS = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": CALL,
        },
        "content": {"close_pattern": r"<\|im_end\|>"},
    },
}

TAGS = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": ["<think>", "<thought>"], "close": ["</think>", "</thought>"]},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\1>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}

LAX = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}

TOOLS = [tool("f", s={"type": "string"}, n={"type": "integer"}), tool("g")]

ANSWERS = [
    (JSON_CALLS, '<think>\nhm\n</think>\n\nHi<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'),
    (JSON_CALLS, 'Hi\n<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    (JSON_CALLS, "a < b, <thinking and <|im_e"),
    (TAGS, "<thought>hm</thought><call:f><s>a b</s><n>3</n></call>"),
    (TAGS, "<call:g></call>"),
    (LAX, '<|channel>thought\nhm<channel|>Hi<|tool_call>call:f{s:<|"|>a: {b}<|"|>,n:3}<tool_call|>'),
]  # fmt: skip


def parse(
    template: dict[str, Any],
    pieces: list[str],
    tool_format: str = RESPONSE_TEMPLATE,
    reasoning_format: str = RESPONSE_TEMPLATE,
    *,
    inside: bool = False,
) -> ParsedOutput:
    loaded = load_response_template(json.dumps(template))
    return parse_pieces(pieces, tool_format, reasoning_format, tools=TOOLS, inside=inside, template=loaded)


@pytest.mark.parametrize(("template", "answer"), ANSWERS)
def test_equals_the_parser_of_hugging_face(template: dict[str, Any], answer: str) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    theirs = chat_parsing.parse_response(answer, template, prefix="", tools=TOOLS)
    ours = parse(template, [answer])
    assert ours.text.strip() == theirs.get("content", "").strip()
    assert ours.reasoning == theirs.get("thinking", theirs.get("reasoning_content", ""))
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in theirs.get("tool_calls", [])]
    assert [(call.name, json.loads(call.arguments)) for call in ours.calls] == calls
    assert all(call.complete for call in ours.calls)


@pytest.mark.parametrize("template", [JSON_CALLS, TAGS, LAX])
@given(
    pieces=st.lists(
        st.sampled_from(
            [piece for _, answer in ANSWERS for piece in re.findall(r"<[^<>]*>|[^<]+", answer)]
            + ["<", "x ", "\n", "{"]
        ),
        max_size=12,
    ),
    size=st.integers(1, 9),
    inside=st.booleans(),
    formats=st.sampled_from(
        [(RESPONSE_TEMPLATE, RESPONSE_TEMPLATE), (RESPONSE_TEMPLATE, ""), ("", RESPONSE_TEMPLATE)]
    ),
)
def test_cuts_do_not_matter(
    template: dict[str, Any], pieces: list[str], size: int, inside: bool, formats: tuple[str, str]
) -> None:
    text = "".join(pieces)
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(template, cut, *formats, inside=inside) == parse(template, [text], *formats, inside=inside)


def test_a_match_that_more_text_could_lengthen_waits() -> None:
    text = "<|tool_call>call:long_name{n:1}<tool_call|>"
    assert [call.name for call in parse(LAX, list(text)).calls] == ["long_name"]


def test_what_cannot_be_understood_is_text() -> None:
    text = "<tool_call>no JSON</tool_call>"
    assert parse(JSON_CALLS, [text]) == ParsedOutput(text, "", ())
    assert parse(JSON_CALLS, ["<tool_call>no end"]) == ParsedOutput("", "", ())


def test_what_is_not_parsed_is_text() -> None:
    text = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(JSON_CALLS, [text], tool_format="").text == text[16:]
    assert parse(JSON_CALLS, [text], reasoning_format="").text == text[:16]


def test_where_an_answer_begins() -> None:
    template = load_response_template(json.dumps(JSON_CALLS))
    assert starts_in_reasoning("response_template", "<|im_start|>assistant\n<think>\n", template)
    assert not starts_in_reasoning("response_template", "<think></think>\n", template)
    assert parse(JSON_CALLS, ["hm</think>Hi"], inside=True) == ParsedOutput("Hi", "hm", ())


def test_a_forced_call_behind_reasoning() -> None:
    parsed = parse(JSON_CALLS, ['<think>hm</think>{"n": 1}'], tool_format="forced_call")
    assert (parsed.reasoning, parsed.calls[0].arguments) == ("hm", '{"n": 1}')


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{", "is not JSON"),
        ('{"version": 2, "fields": {"content": {}}}', "version 2"),
        ('{"fields": {"content": {}, "other": {}}}', "content, other"),
        ('{"fields": {"content": {"opens": "x"}}}', "unknown keys opens"),
        ('{"fields": {"content": {"open_pattern": "("}}}', "no regular expression"),
        ('{"fields": {"content": {"content": "yaml"}}}', "'yaml' is unknown"),
        (
            '{"fields": {"tool_calls": {"open": "<", "content": "xml-inline"}}}',
            "needs the groups key and value",
        ),
        ('{"fields": {"content": {"open": "<", "open_pattern": "<"}}}', "both open and open_pattern"),
    ],
)
def test_a_bad_template_is_named(template: str, fault: str) -> None:
    with pytest.raises(InvalidTemplate, match=re.escape(fault)):
        load_response_template(template)


@pytest.mark.parametrize(
    ("tool_format", "fault"),
    [
        ("response_template", "needs the model's response_template"),
        ("new", r"no format 'new' \(known: .*hermes"),
    ],
)
def test_a_missing_format_is_named(tool_format: str, fault: str) -> None:
    with pytest.raises(MissingFormat, match=fault):
        make_parser(tool_format, "", tools=[], starts_in_reasoning=False)
