"""Forms that the recorded outputs lack, and rules for malformed ones."""

import json
from typing import Any

import jsonschema
import pytest

from headwater.actors.edge.parsing.grammar import ParsedOutput
from headwater.actors.edge.parsing.json_value import cast, types_of_parameter
from headwater.actors.edge.parsing.regions import forced_schema
from headwater.actors.edge.parsing.selection import starts_in_reasoning
from tests.parsers.hard_cases import tool
from tests.unit.actors.edge.parsing.support import parse

TOOLS = [
    tool("f", s={"type": "string"}, n={"type": "integer"}, o={"type": ["object", "null"]}),
    tool("g", a={"type": "array"}),
]


def calls_of(parsed: ParsedOutput) -> list[tuple[str, Any]]:
    assert all(call.complete for call in parsed.calls)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def test_python_literals() -> None:
    text = r"""[f(s='it\'s \u00e9\x41\n"q"', n=-1_000, o={'k': (True, None), "x": 0x10})]"""
    assert calls_of(parse(text, "pythonic", tools=TOOLS)) == [
        ("f", {"s": 'it\'s éA\n"q"', "n": -1000, "o": {"k": [True, None], "x": 16}})
    ]


@pytest.mark.parametrize("text", ["[1] and [link](url)", "[h(a=1)]", "a[f] = x", "[f (or g)]"])
def test_lists_that_are_no_calls_are_text(text: str) -> None:
    assert parse(text, "pythonic", tools=TOOLS) == ParsedOutput(text, "", ())


def test_nesting_is_bounded() -> None:
    deep = "[" * 5_000
    for tool_format, text in (
        ("pythonic", f"[f(o={deep}"),
        ("gemma4", f"<|tool_call>call:f{{o:{deep}"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"o": {deep}'),
        ("glm", f"<tool_call>f<arg_key>o</arg_key><arg_value>{deep}</arg_value></tool_call>"),
    ):
        parsed = parse(text, tool_format, tools=TOOLS)
        assert [call.name for call in parsed.calls] == ["f"]


def test_ids_that_the_model_writes() -> None:
    kimi = '<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'
    assert parse(kimi, "kimi_k2", tools=TOOLS).calls[0].id == "functions.f:3"
    mistral = '[TOOL_CALLS]f[CALL_ID]Ab1[ARGS]{"n": 1}'
    assert parse(mistral, "mistral", tools=TOOLS).calls[0].id == "Ab1"
    cohere = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>'
    assert parse(cohere, "cohere_command", tools=TOOLS).calls[0].id == "0"
    solar = "<|tool_call:begin|>id0<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|><|calls|>"
    assert parse(f"<|tool_calls|>{solar}", "solar_open", tools=TOOLS).calls[0].id == "id0"
    array = '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "xyz"}]'
    parsed = parse(array, "mistral", tools=TOOLS)
    assert calls_of(parsed) == [("f", {"n": 1})]


def test_malformed_markup_is_passed_on_without_an_end() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>"
    assert parse(text, "qwen3_coder", tools=TOOLS).calls[0].complete
    text = '<invoke name="f"><parameter name="s">a</parameter>'
    (call,) = parse(text, "minimax_m2", tools=TOOLS).calls
    assert (call.arguments, call.complete) == ('{"s": "a"', False)


def test_harmony_without_headers_is_text() -> None:
    assert parse("Hello", "harmony", "harmony") == ParsedOutput("Hello", "", ())
    text = "<|channel|>analysis<|message|>hm<|channel|>final<|message|>Hi <|end|> there"
    assert parse(text, "harmony", "harmony") == ParsedOutput("Hi <|end|> there", "hm", ())
    assert parse('<|channel|>final {"a": 1}', "harmony", "harmony").text == 'final {"a": 1}'
    assert parse("<|channel|>fin", "harmony", "harmony") == ParsedOutput("", "", ())


@pytest.mark.parametrize(
    ("raw", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5", {"string", "integer"}, 5),
        ("five", {"integer"}, "five"),
        ("1e3", {"number"}, 1000.0),
        (".5", {"number"}, 0.5),
        ("nan", {"number"}, "nan"),
        ("True", {"boolean"}, True),
        ("null", {"null", "string"}, None),
        ("null", {"string"}, "null"),
        ("{'a': (1,)}", {"object"}, {"a": [1]}),
        ('{"a": 1}', {"string"}, '{"a": 1}'),
        ('{"a": 1}', set(), {"a": 1}),
        ("  text ", set(), "  text "),
    ],
)
def test_cast(raw: str, types: set[str], value: Any) -> None:
    made = json.loads(cast(raw, frozenset(types)))
    assert made == value
    assert type(made) is type(value)


def test_types_of_a_parameter() -> None:
    schema = {
        "properties": {
            "r": {"$ref": "#/$defs/R"},
            "e": {"enum": ["a", None]},
            "u": {"anyOf": [{"type": "integer"}, {"type": "string", "nullable": True}]},
            "loop": {"$ref": "#/properties/loop"},
        },
        "$defs": {"R": {"type": "object"}},
        "additionalProperties": {"type": "number"},
    }
    found = {name: set(types_of_parameter(schema, name)) for name in ("r", "e", "u", "loop", "other")}
    assert found == {
        "r": {"object"},
        "e": {"string", "null"},
        "u": {"integer", "string", "null"},
        "loop": set(),
        "other": {"number"},
    }


def test_forced_schema() -> None:
    reference = {"$ref": "#/definitions/D"}
    first = {"type": "object", "properties": {"d": reference}, "definitions": {"D": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": first}},
        {"name": "g", "input_schema": {}},
    ]
    assert forced_schema(tools, "f", True) == first
    assert forced_schema(tools, "g", True) == {"type": "object"}
    schema = forced_schema(tools, "", False)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert schema["$defs"] == {"D": {"type": "string"}}
    one, other = schema["items"]["anyOf"]
    assert one["properties"]["parameters"]["properties"]["d"] == {"$ref": "#/$defs/D"}
    assert other["properties"]["name"] == {"type": "string", "enum": ["g"]}
    assert "maxItems" not in forced_schema(tools, "", True)
    with pytest.raises(ValueError, match="'h', which is not among the tools: f, g"):
        forced_schema(tools, "h", True)
    with pytest.raises(ValueError, match="there are no tools"):
        forced_schema([], "", True)


def forced_call_of(parameters: dict[str, Any], *others: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """A validator of the arrays of calls that a demanded call may be; the first tool is `f`, further ones are `g0`, `g1`, …"""
    tools = [{"name": f"g{number}", "input_schema": other} for number, other in enumerate(others)]
    schema = forced_schema([*tools, {"name": "f", "input_schema": parameters}], "", True)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


NESTED = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "child": {"$ref": "#"}},
    "required": ["text"],
}
ALIKE = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "second": {"$ref": "#/properties/first"}},
    "required": ["second"],
}


def with_definition(kind: str) -> dict[str, Any]:
    """A schema whose one parameter is a definition `D` of this type."""
    return {"type": "object", "properties": {"d": {"$ref": "#/$defs/D"}}, "$defs": {"D": {"type": kind}}}


@pytest.mark.parametrize(
    ("schema", "others", "right", "wrong"),
    [
        (NESTED, (), {"text": "a", "child": {"text": "b"}}, {"text": "a", "child": {"text": 1}}),
        (ALIKE, (), {"second": 1}, {"second": "one"}),
        (with_definition("string"), (with_definition("number"),), {"d": "a"}, {"d": 1}),
        (with_definition("string"), (with_definition("string"),), {"d": "a"}, {"d": 1}),
        (NESTED, (NESTED, ALIKE), {"text": "a", "child": {"text": "b"}}, {"child": {"text": "b"}}),
        # A parameter of that name is no reference.
        (
            {"type": "object", "properties": {"$ref": {"type": "integer"}}, "required": ["$ref"]},
            (),
            {"$ref": 1},
            {"$ref": "#"},
        ),
    ],
)
def test_references_of_a_tools_schema_keep_their_target(
    schema: dict[str, Any], others: tuple[dict[str, Any], ...], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """To the schema itself, to a parameter, and to definitions whose name other tools give to something else."""
    validator = forced_call_of(schema, *others)
    assert validator.is_valid([{"name": "f", "parameters": right}])
    assert not validator.is_valid([{"name": "f", "parameters": wrong}])
    assert "$ref" in str(validator.schema)


@pytest.mark.parametrize(
    ("reasoning_format", "prompt", "inside"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("think", "<|im_start|>assistant\n", False),
        ("think_opened", "<|im_start|>assistant\n", True),
        ("think_opened", "<|im_start|>assistant\n<think></think>", False),
        ("mistral", "[/INST]", False),
        ("harmony", "<|start|>assistant", False),
        ("", "<think>", False),
    ],
)
def test_where_an_answer_begins(reasoning_format: str, prompt: str, inside: bool) -> None:
    assert starts_in_reasoning(reasoning_format, prompt) is inside
