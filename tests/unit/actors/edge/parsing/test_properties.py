"""Properties of every format: cuts do not matter, nothing raises, no text is lost, complete arguments are JSON."""

import json
import re
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.grammar import ParsedOutput, collect
from tests.parsers.answers import Answer, Call
from tests.parsers.hard_cases import tool
from tests.parsers.writers import FIRST, WRITERS
from tests.unit.actors.edge.parsing.support import parse_pieces

TOOLS = [
    tool("f", s={"type": "string"}, n={"type": "integer"}, x={}),
    tool("g", o={"type": "object"}, u={"anyOf": [{"type": "number"}, {"type": "null"}]}),
]

PAIRS = [
    ("", "think"),
    ("hermes", "think"),
    ("llama3_json", ""),
    ("pythonic", ""),
    ("mistral", "mistral"),
    ("deepseek_v3", "think"),
    ("deepseek_v31", "think"),
    ("deepseek_v32", "think"),
    ("qwen3_coder", "think"),
    ("glm", "think"),
    ("kimi_k2", "think"),
    ("kimi_k3", "kimi_k3"),
    ("minimax_m2", "think"),
    ("gemma4", "gemma4"),
    ("harmony", "harmony"),
    ("forced_call", "think"),
    ("forced_calls", "think_opened"),
]

JSON_PIECES = [
    '{"name": "f", "arguments": ',
    '{"s": "a',
    '", "n": 1}',
    "}",
    "]",
    ",",
    "{",
    "[",
    '"',
    "\\",
    ": ",
    "null",
]

PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": {"s": 1}}', ";"],
    "pythonic": ["[f(", "s='a", "n=1, ", "', ", ")", "]", "<|python_start|>", "\\x4", "\\u00e9", '"'],
    "mistral": ["[TOOL_CALLS]", "f[ARGS]", "[CALL_ID]1", "[THINK]", "[/THINK]"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>f\n```json\n", "\n```", "<｜tool▁call▁end｜>"],
    "deepseek_v31": ["<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    "deepseek_v32": ['<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="s" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", '<｜DSML｜invoke name="g"/>'],
    "qwen3_coder": ["<tool_call>\n", "<function=f>\n", "<parameter=s>\n", "<parameter=n>", "\n</parameter>", "</function>", "</tool_call>"],
    "glm": ["<tool_call>f", "<arg_key>s</arg_key>", "<arg_key>n</arg_key>\n", "<arg_value>", "</arg_value>", "</tool_call>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    "kimi_k3": ["<|open|>response<|sep|>", '<|open|>call tool="f"<|sep|>', '<|open|>argument key="s" type="string"<|sep|>', "<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|open|>tools<|sep|>"],
    "minimax_m2": ["<minimax:tool_call>", '<invoke name="f">', '<parameter name="s">', "</parameter>", "</invoke>"],
    "gemma4": ["<|tool_call>call:f{", "s:", '<|"|>', "n:1", "}", "]", "[", ",", "<tool_call|>", "<|channel>thought", "<channel|>"],
    "harmony": ["<|start|>assistant", "<|channel|>analysis", "<|channel|>final", " to=functions.f", "<|message|>", "<|end|>", "<|call|>"],
}  # fmt: skip

PLAIN = ["word ", "\n", " ", "é🌸", "a < b", "<", "|", "\x00"]


def markup_of(tool_format: str) -> list[str]:
    """Pieces of what families write in a format, cut before and after its markup."""
    answer = Answer("hm", ("Looking.", (Call("f", {"s": "a", "n": 3}), Call("g", {"o": {"a": "x"}}))))
    texts = [one.write(answer, Random(1)) for one in WRITERS.values() if one.tool_format == tool_format]
    return sorted({piece for text in texts for piece in re.split(r"(?=[<\[{])|(?<=[>\]}])", text) if piece})


def fragments(tool_format: str) -> st.SearchStrategy[str]:
    """Texts made of the format's own markup, broken JSON and prose, in any order."""
    pieces = [*PIECES.get(tool_format, markup_of(tool_format)), *JSON_PIECES, *PLAIN, "<think>", "</think>"]
    return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=4)), max_size=14).map("".join)


def cut(text: str, sizes: list[int]) -> list[str]:
    """Cut `text` into pieces of these sizes, over and over."""
    pieces = []
    at = turn = 0
    while at < len(text):
        pieces.append(text[at : at + sizes[turn % len(sizes)]])
        at += len(pieces[-1])
        turn += 1
    return pieces


FAMILY_PAIRS = sorted(
    {(family.tool_format, family.reasoning_format) for family in WRITERS.values()}
    | {("", name) for name in REASONING_FORMATS}
)


def test_every_format_is_covered() -> None:
    pairs = [*PAIRS, *FAMILY_PAIRS]
    assert {pair[0] for pair in pairs} - {""} == set(TOOL_FORMATS)
    assert {pair[1] for pair in pairs} - {""} == set(REASONING_FORMATS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "+".join(pair))
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), inside=st.booleans())
def test_cuts_do_not_matter(
    pair: tuple[str, str], data: st.DataObject, sizes: list[int], inside: bool
) -> None:
    check_cuts(pair, data, sizes, inside)


@settings(max_examples=200)
@given(
    pair=st.sampled_from(FAMILY_PAIRS),
    data=st.data(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    inside=st.booleans(),
)
def test_cuts_do_not_matter_in_single_families(
    pair: tuple[str, str], data: st.DataObject, sizes: list[int], inside: bool
) -> None:
    check_cuts(pair, data, sizes, inside)


def check_cuts(pair: tuple[str, str], data: st.DataObject, sizes: list[int], inside: bool) -> None:
    """Whole and in pieces of these sizes, a text of the pair's formats has one meaning."""
    text = data.draw(fragments(pair[0]))
    formats = [name if data.draw(st.booleans()) else "" for name in pair]
    whole = parse_pieces([text], *formats, tools=TOOLS, inside=inside)
    assert parse_pieces(cut(text, sizes), *formats, tools=TOOLS, inside=inside) == whole
    for call in whole.calls:
        assert call.name
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    json.dumps(whole, ensure_ascii=False).encode()  # everything can be sent on


HARMONY_HEADER = re.compile(r"[ \t\r\n]*(?:to=|to?\Z|\Z)")
"""What begins a message's header, in which an answer of Harmony begins: a recipient, or whatever of it was not cut off."""


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "+".join(pair))
@example(text=" ", size=1)
@example(text="\nto", size=1)
@given(
    text=st.text(st.characters(exclude_characters="<[{|", exclude_categories=["Cs"])), size=st.integers(1, 9)
)
def test_text_without_markup_is_unchanged(pair: tuple[str, str], text: str, size: int) -> None:
    if pair[0] == "harmony" and HARMONY_HEADER.match(text):
        return
    parsed = parse_pieces(cut(text, [size]), *pair, tools=TOOLS)
    assert parsed == ParsedOutput(text, "", ())


AROUND = (
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v31",
    "qwen3_coder",
    "glm",
    "kimi_k2",
    "minimax_m2",
    "gemma4",
)


@pytest.mark.parametrize("tool_format", AROUND)
@given(texts=st.lists(st.text("ab é.\n", min_size=1), min_size=1, max_size=4), size=st.integers(1, 9))
def test_text_around_calls_is_kept(tool_format: str, texts: list[str], size: int) -> None:
    """Up to whitespace next to the calls, which belongs to them in some formats."""
    call = WRITERS[FIRST[tool_format]].write(Answer("", ((Call("f", {"n": 1}),),)), Random(1))
    parsed = parse_pieces(cut(call.join(texts), [size]), tool_format, tools=TOOLS)
    assert re.sub(r"\s", "", parsed.text) == re.sub(r"\s", "", "".join(texts))
    assert [(call.name, json.loads(call.arguments), call.complete) for call in parsed.calls] == [
        ("f", {"n": 1}, True)
    ] * (len(texts) - 1)


def test_events_of_nothing() -> None:
    for pair in PAIRS:
        assert parse_pieces([], *pair, tools=TOOLS) == collect([])
