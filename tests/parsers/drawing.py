"""Drawing tools, arguments and prose from a source of random numbers.

Whatever is drawn first in a choice is the simplest.
"""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from tests.parsers.answers import Answer, Call, Schema

T = TypeVar("T")

NAMES: Final = ("f", "get_weather", "search", "mcp__files__read", "add2", "write_file", "calc")

KEYS: Final = (
    "s",
    "city",
    "n",
    "file_path",
    "content",
    "is_active",
    "x1",
    "naïve",
    "camelCase",
    "type",
    "name",
    "id",
)

WORDS: Final = (
    "", "a", "Paris, France", "two words", "007", "02134", "+15551234567", "1", "-3.5", "1e5", "0x1F", "1_000", "true",
    "True", "false", "null", "None", "NaN", "[]", "{}", "[1, 2]", '{"a": 1}', '"quoted"', "it's", 'say "hi"', "back\\slash",
    "C:\\new\\table", "line 1\nline 2", "tab\tbed", "\n", " ", " padded ", "\nled by a newline", "ended by one\n", "a\n\n\nb",
    "é", "東京 🌸", "\u2028", "&lt;b&gt; & c", "a < b > c", "has } brace", "has { brace", "has ] and ) and ,", "key: value", "a=1, b=2",
    "print('hi')", "'''", '"""', "```json\n{}\n```", "$var", "%s", "{{x}}", "#comment", "/", "\\", "\\n", '\\"', "'", '"',
)  # fmt: skip

MARKUP: Final = (
    "<parameter=x>", "\n<parameter=x>\n", "</parameter>", "\n</parameter>\n", "</parameter> and", "<tool_call>", "</tool_call>",
    "<function=f>", "</function>", "\n</function>\n", "<tool_call>\n<function=", '<invoke name="f">', "</invoke>",
    '<parameter name="x">', "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "[TOOL_CALLS]",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<｜tool▁call▁end｜>", "</｜DSML｜parameter>", "<tool_call|>", "<|python_tag|>", "<html>",
    "</", "<", "<|", "{", "}", "[", "]",
)  # fmt: skip

PROSE: Final = (
    "Let me look.", "Here it is:", "Line one.\nLine two.", "Is a < b? Yes, and b > a.", "A list: [1, 2] and {x: 1}.", "東京 🌸",
    "Use `f(x)` here.", "1. First\n2. Second", 'He said "no".', "<b>bold</b>", "Costs $5 | 10%.", "x = {'a': 1}", "[link](https://example.org)",
)  # fmt: skip


def choice(rnd: Random, items: Sequence[T]) -> T:
    return items[rnd.randrange(len(items))]


def often(rnd: Random, of: int) -> bool:
    """True but for once in `of` times."""
    return rnd.randrange(of) > 0


def seldom(rnd: Random, of: int) -> bool:
    """True once in `of` times."""
    return rnd.randrange(of) == of - 1


def draw_string(rnd: Random, markup: Sequence[str] = ()) -> str:
    """A string: a word with a difficulty, or several, with markup of many formats and that of `markup` between them."""
    if often(rnd, 3):
        return choice(rnd, WORDS)
    pieces = []
    for _ in range(1 + rnd.randrange(4)):
        kind = rnd.randrange(3)
        pieces.append(choice(rnd, (WORDS, MARKUP, (*markup, "x"))[kind]))
    return "".join(pieces)


LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"

PLANES: Final = (
    (0x20, 0x7F),
    (0, 0x20),
    (0x7F, 0x3000),
    (0x3000, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x110000),
)
"""Ranges of characters; those left out are no characters but halves of pairs."""


def draw_characters(rnd: Random) -> str:
    """Any characters, mostly those of ASCII."""
    ranges = [PLANES[0] if often(rnd, 3) else choice(rnd, PLANES) for _ in range(1 + rnd.randrange(5))]
    return "".join(chr(first + rnd.randrange(end - first)) for first, end in ranges)


def draw_wild_string(rnd: Random, markup: Sequence[str] = ()) -> str:
    """A string as `draw_string` draws it, or one with any characters, and with markers that are cut at either end."""
    if rnd.randrange(2):
        return draw_string(rnd, markup)
    pieces = []
    for _ in range(1 + rnd.randrange(4)):
        kind = rnd.randrange(4)
        if kind == 0:
            pieces.append(draw_characters(rnd))
        else:
            whole = choice(rnd, (WORDS, MARKUP, (*markup, "x"))[kind - 1])
            cut = rnd.randrange(len(whole) + 1)
            pieces.append(whole[:cut] if rnd.randrange(2) else whole[cut:])
    return "".join(pieces)


def draw_identifier(rnd: Random) -> str:
    """A name that every format can write."""
    characters = LETTERS + "0123456789"
    return choice(rnd, LETTERS) + "".join(choice(rnd, characters) for _ in range(rnd.randrange(12)))


def draw_number(rnd: Random) -> float:
    return choice(rnd, (0, 1.5, -1, 42, -0.25, 3.0, 1e21, 2.5e-7, 12345678901234567890, -7))


def draw_integer(rnd: Random) -> int:
    return choice(rnd, (0, 1, -1, 5, 42, 2**31, -(2**63), 12345678901234567890, 10**15, 100))


_SIMPLE: Final[tuple[Schema, ...]] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "enum": ["a", "b c", "1", "null", "true", ""]},
    {"enum": ["celsius", "fahrenheit", None]},
    {"type": "integer", "enum": [1, 2, 3]},
    {"type": ["string", "null"]},
    {"type": ["integer", "null"]},
    {"type": "string", "nullable": True},
    {"anyOf": [{"type": "number"}, {"type": "null"}]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "string"}]},
    {"type": ["array", "null"], "items": {"type": "string"}},
    {"anyOf": [{"type": "object"}, {"type": "string"}]},
    {"type": "object"},
    {"type": "array"},
    {"const": "fixed"},
    {},
    {"$ref": "#/$defs/named"},
)

DEFINITIONS: Final = {"named": {"type": "string", "description": "by reference"}}


def draw_schema(rnd: Random, depth: int = 2) -> Schema:
    kind = rnd.randrange(6)
    if kind < 4 or not depth:
        return choice(rnd, _SIMPLE)
    if kind == 4:
        return {"type": "array", "items": draw_schema(rnd, depth - 1)}
    keys = [choice(rnd, KEYS) for _ in range(rnd.randrange(3))]
    return {"type": "object", "properties": {key: draw_schema(rnd, depth - 1) for key in keys}}


def draw_value(rnd: Random, schema: Schema, text: Callable[[], str], depth: int = 3) -> Any:
    if "$ref" in schema:
        schema = DEFINITIONS[schema["$ref"].rsplit("/", 1)[-1]]
    if "enum" in schema:
        return choice(rnd, schema["enum"])
    if "const" in schema:
        return schema["const"]
    choices: list[Schema] = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if choices:
        return draw_value(rnd, choice(rnd, choices), text, depth)
    kind = schema.get("type", ("string", "integer", "boolean", "null", "array", "object"))
    if not isinstance(kind, str):
        kind = choice(rnd, kind)
    if schema.get("nullable") and seldom(rnd, 3):
        kind = "null"
    if kind == "string":
        return text()
    if kind in ("array", "object"):
        return _draw_structure(rnd, schema, kind, text, depth - 1)
    if kind == "null":
        return None
    return (
        rnd.randrange(2) == 1
        if kind == "boolean"
        else (draw_integer if kind == "integer" else draw_number)(rnd)
    )


def _draw_structure(rnd: Random, schema: Schema, kind: str, text: Callable[[], str], depth: int) -> Any:
    free: Schema = {} if depth > 0 else {"type": "string"}
    if kind == "array":
        return [draw_value(rnd, schema.get("items", free), text, depth) for _ in range(rnd.randrange(3))]
    properties = schema.get("properties", dict.fromkeys(KEYS[:3], free))
    return {key: draw_value(rnd, one, text, depth) for key, one in properties.items() if often(rnd, 3)}


def draw_tools(rnd: Random, *, wild: bool = False) -> list[dict[str, Any]]:
    """One to three tools, in the form of the chat completions API. `wild`: their names and keys are any, not only those listed here."""

    def name_of(names: Sequence[str]) -> str:
        return draw_identifier(rnd) if wild and seldom(rnd, 3) else choice(rnd, names)

    tools = []
    for name in sorted({name_of(NAMES) for _ in range(1 + rnd.randrange(3))}):
        keys = sorted({name_of(KEYS) for _ in range(rnd.randrange(4))})
        properties = {key: draw_schema(rnd) for key in keys}
        parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": keys[:1]}
        if '"$ref"' in json.dumps(properties):
            parameters["$defs"] = DEFINITIONS
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    return tools


def draw_call(
    rnd: Random,
    tools: Sequence[dict[str, Any]],
    *,
    markup: Sequence[str],
    unsafe: re.Pattern[str] | None,
    wild: bool = False,
) -> Call:
    """A call of one of the tools. Its strings have nothing that `unsafe` matches."""
    function = choice(rnd, tools)["function"]

    def text() -> str:
        found = (draw_wild_string if wild else draw_string)(rnd, markup)
        # Within structures a string is written as JSON.
        written = (found, json.dumps(found, ensure_ascii=False))
        return "plain" if unsafe is not None and any(map(unsafe.search, written)) else found

    parameters = function["parameters"]
    return Call(
        function["name"],
        {
            key: draw_value(rnd, schema, text)
            for key, schema in parameters["properties"].items()
            if key in parameters["required"] or often(rnd, 3)
        },
    )


def draw_prose(rnd: Random) -> str:
    """Text around calls, without anything that a format means something by."""
    return " ".join(choice(rnd, PROSE) for _ in range(1 + rnd.randrange(2)))


def draw_wild_prose(rnd: Random, markers: Sequence[str]) -> str:
    """Text as `draw_prose` draws it, with any characters and the beginnings of markers behind it."""
    pieces = [draw_prose(rnd)]
    for _ in range(rnd.randrange(3)):
        marker = choice(rnd, (*markers, "<"))
        begun = marker[: rnd.randrange(len(marker))] if rnd.randrange(2) else draw_characters(rnd)
        pieces.append(begun)
    text = " ".join(pieces)
    return pieces[0] if any(marker in text for marker in markers) else text


def draw_answer(
    rnd: Random,
    tools: Sequence[dict[str, Any]],
    *,
    markup: Sequence[str] = (),
    unsafe: re.Pattern[str] | None = None,
    reasons: bool = True,
    before: bool = True,
    between: bool = True,
    behind: bool = True,
    calls_max: int = 3,
    markers: Sequence[str] = (),
    wild: bool = False,
) -> Answer:
    """One to three calls in groups, with or without reasoning and text around them, as far as the format has a place for that.

    `wild` texts have beginnings of `markers`, but none of them whole.
    """

    def prose() -> str:
        return draw_wild_prose(rnd, markers) if wild else draw_prose(rnd)

    reasoning = prose() if reasons and rnd.randrange(2) else ""
    parts: list[str | tuple[Call, ...]] = []
    if before and rnd.randrange(2):
        parts.append(prose())
    group: list[Call] = []
    for number in range(1 + rnd.randrange(calls_max)):
        if number and between and seldom(rnd, 3):
            parts += [tuple(group), prose()]
            group = []
        group.append(draw_call(rnd, tools, markup=markup, unsafe=unsafe, wild=wild))
    parts.append(tuple(group))
    if behind and seldom(rnd, 3):
        parts.append(prose())
    return Answer(reasoning, tuple(parts))


def draw_pieces(rnd: Random, text: str) -> list[str]:
    """The text cut into pieces: characters, or pieces of random sizes."""
    largest = choice(rnd, (1, 2, 3, 7, 20, 60))
    pieces = []
    at = 0
    while at < len(text):
        size = 1 + rnd.randrange(largest)
        pieces.append(text[at : at + size])
        at += size
    return pieces
