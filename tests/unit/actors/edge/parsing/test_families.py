"""Formats of single families, each on an answer in the form that its chat template and vLLM's or SGLang's parser document."""

import json
from typing import Any, NamedTuple

import pytest

from headwater.actors.edge.parsing.events import ParsedOutput, ToolArgumentsDelta, ToolCallStart
from headwater.actors.edge.parsing.formats import TOOL_FORMATS
from headwater.actors.edge.parsing.selection import make_parser
from tests.unit.actors.edge.parsing.support import parse, tool

TOOLS = [
    tool("f", s={"type": "string"}, n={"type": "integer"}, o={"type": "object"}),
    tool("g", a={"type": "array"}),
]


class Family(NamedTuple):
    """An answer with reasoning, text and two calls; what of them each format has."""

    answer: str
    tool_format: str
    reasoning_format: str = ""
    text: str = "Looking."
    reasoning: str = ""
    ids: tuple[str, ...] = ("", "")


F = '{"name": "f", "arguments": {"s": "a", "n": 3}}'
G = '{"name": "g", "arguments": {"a": ["x"]}}'

_QWEN = (
    "<{0}>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</{0}>\n"
    '<{0}>\n<function=g>\n<parameter=a>\n["x"]\n</parameter>\n</function>\n</{0}>'
)
_IFM = (
    "<ifm|tool_call>f\n<ifm|arg_key>s</ifm|arg_key>\n<ifm|arg_value>a</ifm|arg_value>\n"
    "<ifm|arg_key>n</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type><ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n"
)
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{}<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|>"
    "<|plamo:end_tool_request:plamo|>"
)


def _hunyuan(suffix: str) -> str:
    text = (
        "<think>hm</think>Looking.<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        '<tool_call>g<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>["x"]</arg_value>\n</tool_call>\n</tool_calls>'
    )
    return text.replace(">", f"{suffix}>")


FAMILIES: dict[str, Family] = {
    "apertus": Family(
        'Looking.<|tools_prefix|>[{"f": {"s": "a", "n": 3}}, {"g": {"a": ["x"]}}]<|tools_suffix|>', "apertus"
    ),
    "cohere": Family(
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Looking.<|END_RESPONSE|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "f", "parameters": {"s": "a", "n": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {"a": ["x"]}}\n]<|END_ACTION|>',
        "cohere_command",
        "cohere_command",
        reasoning="hm",
        ids=("0", "1"),
    ),
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
    "gigachat3": Family(
        f"Looking.<|message_sep|>\n\nfunction call<|role_sep|>\n{F}<|function_call|>{G}", "gigachat3"
    ),
    "granite 3.0": Family(f"Looking.\n<|tool_call|>[{F}, {G}]", "granite"),
    "granite 3.1": Family(f"Looking.\n<tool_call>[{F}, {G}]", "granite"),
    "granite 3.2": Family(
        f"Here is my thought process: hm Here is my response: Looking.\n<tool_call>[{F}, {G}]",
        "granite",
        "granite",
        reasoning="hm",
    ),
    "granite 20b": Family(f"Looking. <function_call> {F} <function_call> {G}", "granite-20b-fc"),
    "hunyuan": Family(_hunyuan(""), "hunyuan", "hunyuan", reasoning="hm"),
    "hunyuan, released": Family(_hunyuan(":opensource"), "hunyuan", "hunyuan", reasoning="hm"),
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
    "internlm": Family(
        f"Looking.<|action_start|><|plugin|>\n{F}<|action_end|>\n<|action_start|> <|plugin|>{G}<|action_end|>",
        "internlm",
    ),
    "jamba": Family(f"Looking. <tool_calls>[\n    {F},\n    {G}\n]</tool_calls>", "jamba"),
    "k2 horizon": Family(
        "<ifm|think_fast>\nhm\n</ifm|think_fast>\nLooking.\n<ifm|tool_calls>\n"
        f"{_IFM}<ifm|tool_call>{G}</ifm|tool_call>\n</ifm|tool_calls>",
        "k2_horizon",
        "k2_horizon",
        reasoning="hm",
    ),
    "lfm2": Family("Looking.<|tool_call_start|>[f(s='a', n=3), g(a=[\"x\"])]<|tool_call_end|>", "lfm2"),
    "minimax m1": Family(f"Looking.\n<tool_calls>\n{F}\n{G}\n</tool_calls>", "minimax_m1"),
    "nemotron nano 2": Family(f"Looking.\n<TOOLCALL>[{F}, {G}]</TOOLCALL>", "nemotron_nano_v2"),
    "command r": Family(
        "Looking.\nAction:\n```json\n[\n"
        + f"{F},\n{G}".replace('"name"', '"tool_name"').replace('"arguments"', '"parameters"')
        + "\n]```",
        "command_r",
    ),
    "functionary 3.1": Family(
        'Looking.<function=f>{"s": "a", "n": 3}</function><function=g>{"a": ["x"]}</function>',
        "functionary_v31",
    ),
    "minicpm5": Family(
        '<think>\nhm\n</think>\n\nLooking.\n<function name="f"><param name="s">a</param><param name="n">3</param></function>\n'
        '<function name="g"><param name="a">[\'x\']</param></function>',
        "minicpm5",
        "think",
        reasoning="hm",
    ),
    "solar open": Family(
        'Looking.<|tool_calls|><|tool_call:begin|>id0<|tool_call:name|>f<|tool_call:args|>{"s": "a", "n": 3}<|tool_call:end|>'
        '<|tool_call:begin|>id1<|tool_call:name|>g<|tool_call:args|>{"a": ["x"]}<|tool_call:end|><|calls|>',
        "solar_open",
        ids=("id0", "id1"),
    ),
    "longcat": Family(
        f"Looking.\n<longcat_tool_call>\n{F}\n</longcat_tool_call>\n<longcat_tool_call>\n{G}\n</longcat_tool_call>",
        "longcat",
    ),
    "mimo": Family(
        "<think>hm</think>Looking.\n<tool_call>\n<function=f>\n<parameter=s>a</parameter>\n<parameter=n>3</parameter>\n"
        '</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=a>["x"]</parameter>\n</function>\n</tool_call>',
        "mimo",
        "think",
        reasoning="hm",
    ),
    "phi-4-mini": Family(f"Looking. functools[{F}, {G}]", "phi4_mini_json"),
    "plamo3": Family(
        "<|plamo:begin_think:plamo|>hm<|plamo:end_think:plamo|>Looking.<|plamo:begin_tool_requests:plamo|>"
        + _PLAMO.format("f", '{"s": "a", "n": 3}')
        + _PLAMO.format("g", '{"a": ["x"]}')
        + "<|plamo:end_tool_requests:plamo|><|plamo:tag|>",
        "plamo3",
        "plamo3",
        reasoning="hm",
    ),
    "seed-oss": Family(
        "<seed:think>\nhm\n</seed:think>\nLooking.\n"
        + _QWEN.format("seed:tool_call").replace(">\na\n<", ">a<").replace(">\n3\n<", ">3<"),
        "seed_oss",
        "seed_oss",
        reasoning="hm",
    ),
    "step3": Family(
        "hm</think>Looking.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f"><steptml:parameter name="s">a</steptml:parameter>'
        '<steptml:parameter name="n">3</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="g"><steptml:parameter name="a">["x"]'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        "step3",
        "think_opened",
        reasoning="hm",
    ),
    "xlam, bare": Family(f"[{F}, {G}]", "xlam", text=""),
    "xlam, fenced": Family(
        f"<think>hm</think>Looking.\n```json\n[{F}, {G}]\n```", "xlam", "think", reasoning="hm"
    ),
    "xlam, as mistral": Family(f"Looking.\n[TOOL_CALLS][{F}, {G}]", "xlam"),
    "xlam, as hermes": Family(f"Looking.\n<tool_call>[{F}, {G}]</tool_call>", "xlam"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_the_family(name: str) -> None:
    family = FAMILIES[name]
    inside = family.reasoning_format == "think_opened"
    parsed = parse(family.answer, family.tool_format, family.reasoning_format, tools=TOOLS, inside=inside)
    assert (parsed.text, parsed.reasoning) == (family.text, family.reasoning)
    assert [(call.name, json.loads(call.arguments), call.complete) for call in parsed.calls] == [
        ("f", {"s": "a", "n": 3}, True),
        ("g", {"a": ["x"]}, True),
    ]
    assert tuple(call.id for call in parsed.calls) == family.ids


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
        ("<|plamo:begin_think:plamo|>hm<|plamo:end_think:plamo|>Hi<|plamo:tag|>", "plamo3"),
    ):
        assert parse(text, "", reasoning_format) == ParsedOutput("Hi", "hm", ()), reasoning_format


def test_newlines_around_a_value_are_part_of_it_or_of_the_markup() -> None:
    for tool_format, value in (("mimo", "\na\n"), ("qwen3_coder", "a")):
        text = "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>"
        (call,) = parse(text, tool_format, tools=TOOLS).calls
        assert json.loads(call.arguments) == {"s": value}


def test_malformed_keyed_calls_are_passed_on_without_an_end() -> None:
    (call,) = parse('<|tools_prefix|>[{"f": {"s": x}}]<|tools_suffix|>', "apertus", tools=TOOLS).calls
    assert (call.name, call.complete) == ("f", False)
    one, two = parse('<|tools_prefix|>[{"f": {}}, {"g": {"a": [', "apertus", tools=TOOLS).calls
    assert (one.complete, two.complete) == (True, False)


@pytest.mark.parametrize("tool_format", sorted({family.tool_format for family in FAMILIES.values()}))
def test_arguments_are_streamed(tool_format: str) -> None:
    """A string argument reaches the client before the call is whole."""
    answer = next(family.answer for family in FAMILIES.values() if family.tool_format == tool_format)
    made = make_parser(
        tool_format, "", tools=TOOLS, parse_tools=True, parse_reasoning=True, starts_in_reasoning=False
    )
    events = [event for character in answer for event in made.push(character)]
    first = next(index for index, event in enumerate(events) if isinstance(event, ToolCallStart))
    pieces = [event for event in events[first:] if isinstance(event, ToolArgumentsDelta) and event.call == 0]
    assert len(pieces) > 2


def test_every_format_has_an_example() -> None:
    """Here or among the recorded outputs."""
    recorded = {
        *("hermes", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32"),
        *("qwen3_coder", "glm", "kimi_k2", "kimi_k3", "gemma4", "harmony", "minimax_m2"),
        *("forced_call", "forced_calls"),
    }
    assert {family.tool_format for family in FAMILIES.values()} | recorded == set(TOOL_FORMATS)
