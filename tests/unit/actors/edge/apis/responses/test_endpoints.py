"""`/v1/responses` and `/v1/conversations` on memory ports: every field, state, paging, tenants, errors."""

from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.responses_types import CreateFields
from headwater.actors.edge.saga.fields import FieldRow, field_rows
from tests.support.marks import OFFICIAL_CLIENT
from tests.support.worlds.edge import ANSWER, EdgeWorld
from tests.unit.actors.edge.apis.responses.asking import TOOL, USER, create, error_of, prompt
from tests.unit.actors.edge.apis.responses.official import (
    check_response,
    check_schema,
    events_of,
)

pytestmark = OFFICIAL_CLIENT


def test_whole_response(edge: EdgeWorld) -> None:
    found = create(edge, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    response = check_response(found.body)
    check_schema(found.document, "ResponseResource")
    assert response.output_text == ANSWER
    assert (response.status, response.model, response.metadata) == ("completed", "m", {"a": "b"})
    assert prompt(edge).startswith("<|im_start|>system\nBe brief.")
    for never_null in (
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "tool_choice",
        "truncation",
        "background",
        "service_tier",
        "tools",
    ):
        assert found.document[never_null] is not None


def test_streamed_response(edge: EdgeWorld) -> None:
    found = create(edge, stream=True)
    assert found.headers[b"content-type"].startswith(b"text/event-stream")
    events = events_of(found.body)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed"
    assert b"[DONE]" not in found.body


def test_a_limit_makes_it_incomplete(edge: EdgeWorld) -> None:
    response = check_response(create(edge, max_output_tokens=5).body)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_log_probabilities(edge: EdgeWorld) -> None:
    found = create(edge, include=["message.output_text.logprobs"], top_logprobs=1, max_output_tokens=3)
    (item,) = check_response(found.body).output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"background_options": {"completion_window": "2h"}},
        {"prompt": {"id": "pmpt_1"}},
        {"context_management": [{"type": "compaction"}]},
        {"moderation": {"model": "m"}},
        {"access_programs": {"cyber": "standard"}},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_options": {"mode": "explicit"}},
        {"prompt_cache_options": {"prewarm": True}},
        {"image": {"context_compression": "enabled"}},
        {"reasoning": {"mode": "pro"}},
    ],
    ids=str,
)
def test_unsupported_fields_are_rejected_by_name(edge: EdgeWorld, fields: dict[str, Any]) -> None:
    (name,) = fields
    error = error_of(create(edge, **fields))
    assert error["param"].startswith(name)
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "row", [row for row in field_rows(CreateFields) if row.status == "rejected"], ids=lambda r: r.field
)
def test_neutral_values_of_rejected_fields_are_accepted(edge: EdgeWorld, row: FieldRow) -> None:
    name, _, inner = row.field.partition(".")
    for value in (None, *row.rule.accepted):
        assert create(edge, **{name: {inner: value} if inner else value}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "telepathy_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "video"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user"}]}, "input[0]"),
        (
            {"input": [USER, {"type": "function_call_output", "call_id": "no", "output": ""}]},
            "input[1].call_id",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_0_0"}]}, "input[0].id"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "hw1.x"}]}, "input[0].encrypted_content"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"input": [USER, {"type": "additional_tools", "tools": [{"type": "telepathy"}]}]}, "tools[0].type"),
        ({"input": [USER, {"type": "additional_tools"}]}, "input"),
        ({"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"previous_response_id": "resp_a", "conversation": "conv_a"}, "previous_response_id"),
        ({"previous_response_id": "../../x"}, "previous_response_id"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ],
    ids=str,
)
def test_invalid_requests_name_the_place(edge: EdgeWorld, fields: dict[str, Any], param: str) -> None:
    error = error_of(create(edge, **fields))
    assert error["param"] == param
    assert len(error["message"]) < 500


def test_an_image_is_rejected_by_name(edge: EdgeWorld) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    content = [{"type": "input_text", "text": "What is this?"}, image]
    error = error_of(create(edge, input=[{"role": "user", "content": content}]))
    assert error["param"] == "input[0].content[1]"


def test_an_unknown_model_is_404(edge: EdgeWorld) -> None:
    assert error_of(create(edge, model="nope"), 404)["code"] == "model_not_found"


def test_structured_output_becomes_a_guide(edge: EdgeWorld) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    found = create(edge, text={"format": form, "verbosity": "low"})
    guide = edge.given[-1].sampling.guide
    assert guide is not None
    assert guide.kind == "json_schema"
    assert msgspec.json.decode(guide.value) == schema
    assert found.document["text"]["format"]["schema"] == schema
