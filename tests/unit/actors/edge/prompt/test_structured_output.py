"""Guides: three ways to ask for one, and what is refused before an engine sees it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.apis.chat_types import ChatRequest
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError
from headwater.schemas.inference import Guide

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+$", "maxLength": 40},
        "age": {"type": ["integer", "null"], "minimum": 0},
        "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
        "pet": {"anyOf": [{"$ref": "#/$defs/pet"}, {"type": "null"}]},
        "kind": {"enum": ["a", 1, None], "default": "a"},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"pet": {"const": {"cat": True}, "title": "Pet", "x-anything": {"a": [1]}}},
}


def guide(**fields: Any) -> Guide | None:
    """The guide of a chat request with these fields."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    guided = decode_body(ChatRequest, json.dumps(body).encode()).guide()
    return guided[1] if guided else None


def schema_format(schema: Any, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **changes}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": schema_format(PERSON, strict=True)},
        {"response_format": schema_format(PERSON, strict=None, description="who")},
        {"structured_outputs": {"json": PERSON, "regex": None, "disable_any_whitespace": False}},
        {"structured_outputs": {"json": json.dumps(PERSON), "disable_fallback": True}},
        {"guided_json": PERSON, "guided_decoding_backend": "xgrammar"},
        {"guided_json": json.dumps(PERSON), "response_format": {"type": "text"}},
    ],
)
def test_a_schema_may_be_asked_for_in_any_of_the_three_ways(fields: dict[str, Any]) -> None:
    """It reaches the engine whole."""
    found = guide(**fields)
    assert found is not None
    assert found.kind == "json_schema"
    assert msgspec.json.decode(found.value) == PERSON


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide("json_object")),
        ({"response_format": {"type": "json_object", "schema": None}}, Guide("json_object")),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            Guide("json_schema", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"json_object": True}}, Guide("json_object")),
        ({"structured_outputs": {"regex": r"\d{4}-\d{2}"}}, Guide("regex", r"\d{4}-\d{2}")),
        ({"guided_regex": r"(?<year>\p{Nd}{4})"}, Guide("regex", r"(?<year>\p{Nd}{4})")),
        ({"guided_choice": ["yes", "no"]}, Guide("choice", '["yes","no"]')),
        ({"structured_outputs": {"choice": ["ü"]}}, Guide("choice", '["ü"]')),
        ({"guided_grammar": 'root ::= "((((" [(]* | "a"'}, Guide("grammar", 'root ::= "((((" [(]* | "a"')),
    ],
)
def test_each_kind_of_guide(fields: dict[str, Any], expected: Guide | None) -> None:
    """As clients write it, as engines get it."""
    assert guide(**fields) == expected


def nested(levels: int) -> dict[str, Any]:
    """A schema with so many schemas around each other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


def test_the_limits_themselves_are_allowed() -> None:
    """32 levels, 4 KiB of expression, 1,000 choices."""
    assert guide(guided_json=nested(32))
    assert guide(guided_regex="a" * 4096)
    assert guide(guided_choice=[str(number) for number in range(1000)])
    assert guide(guided_grammar="root ::= " + "(" * 32 + '"a"' + ")" * 32)


FORMAT = "response_format.json_schema"
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("response_format.type", {"response_format": {}}, "text, json_object or json_schema"),
    ("response_format.type", {"response_format": {"type": "structural_tag"}}, "json_schema"),
    (FORMAT, {"response_format": {"type": "json_schema"}}, "name and schema"),
    (f"{FORMAT}.name", {"response_format": schema_format(PERSON, name="a b")}, "letters"),
    (f"{FORMAT}.name", {"response_format": schema_format(PERSON, name=None)}, "letters"),
    (f"{FORMAT}.strict", {"response_format": schema_format(PERSON, strict="yes")}, "true or false"),
    (f"{FORMAT}.schema", {"response_format": schema_format(None)}, "an object"),
    ("structured_outputs", {"structured_outputs": {}}, "one of json"),
    ("structured_outputs.xml", {"structured_outputs": {"xml": 1}}, "not supported"),
    ("structured_outputs.whitespace_pattern", {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "not"),
    ("structured_outputs.regex", {"structured_outputs": {"choice": ["a"], "regex": "a"}}, "send one"),
    ("guided_json", {"guided_json": {}, "response_format": {"type": "json_object"}}, "send one"),
    ("guided_json", {"guided_json": "{"}, "not valid JSON"),
    ("guided_json", {"guided_json": [1]}, "an object"),
    ("guided_json", {"guided_json": nested(33)}, "deeper than 32"),
    ("guided_json", {"guided_json": {"enum": [json.loads("[" * 40 + "]" * 40)]}}, "deeper than 32"),
    ("guided_json", {"guided_json": {"x": json.loads("[" * 40 + "]" * 40)}}, "deeper than 32"),
    ("guided_json", {"guided_json": {"enum": list(range(10_001))}}, "more than 10000 parts"),
    ("guided_json", {"guided_json": {"description": "x" * 140_000}}, "larger than"),
    ("guided_json", {"guided_json": {"type": "text"}}, "type must be one or several of array"),
    ("guided_json", {"guided_json": {"type": [3]}}, "type must be a name"),
    ("guided_json", {"guided_json": {"type": []}}, "type must be"),
    ("guided_json", {"guided_json": {"properties": {"a": {"items": {"type": "x"}}}}}, "#/properties/a/items"),
    ("guided_json", {"guided_json": {"properties": []}}, "must map names"),
    ("guided_json", {"guided_json": {"items": 3}}, "a schema must be an object"),
    ("guided_json", {"guided_json": {"anyOf": []}}, "non-empty"),
    ("guided_json", {"guided_json": {"enum": []}}, "non-empty"),
    ("guided_json", {"guided_json": {"required": "a"}}, "list of names"),
    ("guided_json", {"guided_json": {"pattern": "("}}, "not a valid regular expression"),
    ("guided_json", {"guided_json": {"patternProperties": {"(?=a)": {}}}}, "look-around"),
    ("guided_json", {"guided_json": {"maxLength": 10**9}}, "from 0 to"),
    ("guided_json", {"guided_json": {"minItems": True}}, "from 0 to"),
    ("guided_json", {"guided_json": {"minimum": "3"}}, "must be a number"),
    ("guided_json", {"guided_json": {"$ref": "http://169.254.169.254/x"}}, "into this schema only"),
    ("guided_json", {"guided_json": {"items": {"$ref": "file:///etc/passwd"}}}, "into this schema only"),
    ("guided_json", {"guided_json": {"$ref": "#/$defs/none"}}, "does not exist"),
    ("guided_json", {"guided_json": {"$ref": "#/enum/0", "enum": [{"$ref": "http://x"}]}}, "is not a schema"),
    ("guided_json", {"guided_json": {"$ref": "#"}}, "leads to itself"),
    ("guided_json", {"guided_json": {"anyOf": [{"allOf": [{"$ref": "#"}]}]}}, "leads to itself"),
    ("guided_json", {"guided_json": {"$dynamicRef": "#a"}}, "not supported"),
    ("guided_regex", {"guided_regex": ""}, "empty"),
    ("guided_regex", {"guided_regex": 3}, "as a string"),
    ("guided_regex", {"guided_regex": "[a"}, "not a valid regular expression"),
    ("guided_regex", {"guided_regex": "a" * 4097}, "4096 bytes"),
    ("guided_regex", {"guided_regex": "é" * 2049}, "4096 bytes"),
    ("guided_regex", {"guided_regex": "(a{1000}){1000}"}, "smaller counts"),
    ("guided_regex", {"guided_regex": "[ab]{20000}"}, "smaller counts"),
    ("guided_regex", {"guided_regex": "(?!a)b"}, "look-around"),
    ("guided_regex", {"guided_regex": r"(a)\1"}, "references"),
    ("guided_choice", {"guided_choice": []}, "non-empty list of non-empty strings"),
    ("guided_choice", {"guided_choice": ["a", ""]}, "non-empty list of non-empty strings"),
    ("guided_choice", {"guided_choice": ["a", 3]}, "non-empty list of non-empty strings"),
    ("guided_choice", {"guided_choice": ["a", "a"]}, "twice"),
    ("guided_choice", {"guided_choice": [str(number) for number in range(1001)]}, "1000"),
    ("guided_grammar", {"guided_grammar": "  "}, "non-empty"),
    ("guided_grammar", {"guided_grammar": "x" * 140_000}, "larger than"),
    ("guided_grammar", {"guided_grammar": "root ::= " + "(" * 33}, "deeper than 32"),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields", "says"), BAD)
def test_a_bad_guide_is_refused_and_says_where_and_what_to_change(
    param: str, fields: dict[str, Any], says: str
) -> None:
    """Nothing of it gets to an engine, and the error does not echo what was sent."""
    with pytest.raises(ApiError) as caught:
        guide(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 600


def test_references_one_after_the_other_are_bounded() -> None:
    """A chain of 900 is refused, not followed until Python's stack ends."""
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(900)}
    chain["d900"] = {"type": "string"}
    with pytest.raises(ApiError, match="a chain of more than"):
        guide(guided_json={"$ref": "#/$defs/d0", "$defs": chain})


words = st.sampled_from(
    ["type", "properties", "items", "anyOf", "$ref", "$defs", "enum", "required", "pattern", "string", "object",
     "#", "#/$defs/a", "#/items", "a", "minLength", "a{3}", "[", "const", "not", "x"]
)  # fmt: skip
leaves = words | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=20,
)


@given(schema=st.dictionaries(words, anything, max_size=5))
def test_any_schema_is_taken_whole_or_refused(schema: dict[str, Any]) -> None:
    """Never anything but a 400, and what is taken is what was sent."""
    try:
        found = guide(guided_json=schema)
    except ApiError:
        return
    assert found is not None
    assert json.loads(found.value) == schema


@given(text=st.text(st.sampled_from("ab()[]{}|*+?\\^$.,0123:=!<>P-"), max_size=20))
def test_any_expression_is_taken_or_refused(text: str) -> None:
    """The scan of repetitions ends on whatever compiles."""
    try:
        found = guide(guided_regex=text)
    except ApiError:
        return
    assert found == Guide("regex", text)
