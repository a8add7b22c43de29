"""Anthropic's requests as internal requests: a row per field, and an error that names the field."""

from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.anthropic_translate import to_generation, to_prompt
from headwater.actors.edge.apis.anthropic_types import CountTokensRequest, MessagesRequest, decode_fields
from headwater.actors.edge.prompt.request import (
    GenerationRequest,
    MediaPart,
    Reasoning,
    TextPart,
    ToolCall,
    ToolChoice,
    Turn,
)
from headwater.actors.http.errors import ApiError

USER = {"role": "user", "content": "Hi"}
WEATHER = {"name": "get_weather", "input_schema": {"type": "object"}}


def generation(**fields: Any) -> GenerationRequest:
    body = {"model": "tiny", "max_tokens": 64, "messages": [USER], **fields}
    return to_generation(decode_fields(MessagesRequest, msgspec.json.encode(body)))


def turns(*messages: Any, **fields: Any) -> tuple[Turn, ...]:
    return generation(messages=messages, **fields).messages


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        generation(**fields)
    assert error.value.status == 400
    return error.value


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def call(number: str, name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": number, "name": name, "input": arguments}


def answer(number: str, content: Any = "sunny", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": number, "content": content, **fields}


def test_sampling_limits_and_hints() -> None:
    request = generation(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
        stream=True,
        metadata={"user_id": "u1"},
        cache_salt="s",
    )
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 40)
    assert request.max_tokens == 64
    assert request.stops == ("END",)
    assert request.stream
    assert (request.hints.user, request.hints.cache_salt) == ("u1", "s")
    assert generation(top_k=0).sampling.top_k is None


def test_system_blocks_are_one_turn_without_the_billing_header() -> None:
    blocks = [text("x-anthropic-billing-header: cc_version=2; cch=1f;"), text("One."), text("Two.")]
    assert turns(USER, system=blocks)[0] == Turn(role="system", parts=(TextPart("One.\nTwo."),))
    assert turns(USER, system="x-anthropic-billing-header: cch=1f;\nOne.")[0].text() == "One."
    for nothing in ("", "x-anthropic-billing-header: cch=1f;"):
        assert turns(USER, system=nothing)[0].role == "user"


def test_neighbouring_messages_of_a_role_are_one_turn() -> None:
    found = turns(USER, user(text("a"), text("b")), {"role": "assistant", "content": "c"}, USER)
    assert [(turn.role, turn.text()) for turn in found] == [
        ("user", "Hi\na\nb"),
        ("assistant", "c"),
        ("user", "Hi"),
    ]


def test_text_after_a_call_does_not_move_before_it() -> None:
    found = turns(USER, assistant(call("t1")), assistant(text("Later.")), USER)
    assert [(len(turn.calls), turn.text()) for turn in found] == [
        (0, "Hi"),
        (1, ""),
        (0, "Later."),
        (0, "Hi"),
    ]


def test_a_message_without_blocks_is_an_empty_turn() -> None:
    assert turns(user()) == (Turn(role="user"),)


def test_a_tool_loop_becomes_calls_and_tool_turns() -> None:
    found = turns(
        USER,
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            call("t1", city="Zürich"),
            call("t2", "get_time"),
        ),
        user(answer("t1", [text("sun"), text("wind")]), answer("t2", None), text("Well?")),
    )
    assert found[1:] == (
        Turn(
            role="assistant",
            parts=(TextPart("I look."),),
            calls=(ToolCall("t1", "get_weather", '{"city":"Zürich"}'), ToolCall("t2", "get_time", "{}")),
            reasoning="Hm.",
        ),
        Turn(role="tool", parts=(TextPart("sun\nwind"),), name="get_weather", call_id="t1"),
        Turn(role="tool", name="get_time", call_id="t2"),
        Turn(role="user", parts=(TextPart("Well?"),)),
    )


def test_text_before_a_tool_result_keeps_its_place() -> None:
    found = turns(USER, assistant(call("t1")), user(text("Here:"), answer("t1")))
    assert [turn.role for turn in found] == ["user", "assistant", "user", "tool"]


def test_a_failed_call_says_so() -> None:
    found = turns(
        USER,
        assistant(call("t1"), call("t2")),
        user(answer("t1", "no net", is_error=True), answer("t2", None, is_error=True)),
    )
    assert [turn.text() for turn in found[2:]] == ["Error: no net", "Error: "]


def test_an_assistants_last_text_is_continued() -> None:
    request = generation(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert request.prompt_options.continue_final
    assert not request.prompt_options.add_generation_prompt
    assert generation().prompt_options.add_generation_prompt


def test_a_system_message_keeps_its_place() -> None:
    """Claude Code's first request ends with one."""
    brief = {"role": "system", "content": "Be brief."}
    assert [turn.role for turn in turns(USER, brief, USER)] == ["user", "system", "user"]
    assert [turn.role for turn in turns(USER, brief)] == ["user", "system"]


def test_media_are_parts_of_the_request() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    pdf = {"type": "document", "source": {"type": "file", "file_id": "f1"}, "title": "T"}
    plain = {
        "type": "document",
        "source": {"type": "text", "data": "body", "media_type": "text/plain"},
        "title": "T",
    }
    found = {"type": "search_result", "source": "https://e.org", "title": "E", "content": [text("x")]}
    parts = turns(user(text("a"), image, linked, pdf, plain, found))[0].parts
    assert parts == (
        TextPart("a"),
        MediaPart("image", "messages[0].content[1]", data="aGk=", media_type="image/png"),
        MediaPart("image", "messages[0].content[2]", url="https://example.com/a.png"),
        MediaPart("file", "messages[0].content[3]", file_id="f1", name="T"),
        TextPart("T\nbody\nE\nhttps://e.org\nx"),
    )


def test_tools_and_their_choice() -> None:
    tool = {
        **WEATHER,
        "description": "d",
        "strict": True,
        "type": "custom",
        "cache_control": {"type": "ephemeral"},
    }
    found = generation(tools=[tool]).tools[0]
    assert (found.name, found.description, found.parameters, found.strict) == (
        "get_weather",
        "d",
        {"type": "object"},
        True,
    )
    for choice, wanted in (
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "get_weather"}, ToolChoice("named", "get_weather")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
    ):
        assert generation(tools=[WEATHER], tool_choice=choice).tool_choice == wanted


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        (None, Reasoning(effort="low")),
        ({"type": "enabled", "budget_tokens": 9}, Reasoning("low", True, 9)),
        ({"type": "disabled"}, Reasoning("low", False)),
        ({"type": "adaptive", "display": "omitted"}, Reasoning("low", True)),
    ],
)
def test_thinking(thinking: Any, wanted: Reasoning) -> None:
    assert generation(thinking=thinking, output_config={"effort": "low"}).reasoning == wanted


def test_an_output_format_is_a_guide() -> None:
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    request = generation(output_config=output)
    assert request.guide is not None
    assert (request.guide.kind, request.guide_param) == ("json_schema", "output_config.format.schema")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"messages": []}, "messages", "length"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "role"),
        ({"messages": [user({"type": "server_tool_use", "id": "a"})]}, "messages[0].content[0].type", "server"),
        ({"messages": [user(call("t1"))]}, "messages[0].content[0]", "assistant"),
        ({"messages": [USER, assistant(answer("t1"))]}, "messages[1].content[0]", "user"),
        ({"messages": [user(answer("t1"))]}, "messages[0].content[0].tool_use_id", "t1"),
        ({"messages": [USER, assistant(call("t1"))]}, "messages[1].content", "tool_result"),
        ({"tools": [{"type": "telepathy_20250305", "name": "web_search"}]}, "tools[0].type", "telepathy_20250305"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "twice"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "schema"),
        ({"tools": [{**WEATHER, "input_schema": {}}]}, "tools[0].input_schema", "object"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers", "direct"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "'g'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "required"),
        ({"stop_sequences": [""]}, "stop_sequences", "characters"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "16"),
        ({"temperature": 2.1}, "temperature", "2"),
        ({"container": "c"}, "container", "not supported"),
        ({"inference_geo": "us"}, "inference_geo", "not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "output_config.format.schema", "type"),
        (
            {"messages": [user({"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": ""}})]},
            "messages[0].content[0].source.media_type",
            "image/png",
        ),
        (
            {"messages": [user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}})]},
            "messages[0].content[0].source.data",
            "base64",
        ),
        (
            {"messages": [user({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}})]},
            "messages[0].content[0].source.url",
            "https",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "auto"},
        {"speed": "fast"},
        {"context_management": {"edits": []}},
        {"diagnostics": {}},
        {"container": None},
        {"inference_geo": "global"},
        {"mcp_servers": []},
        {"user_profile_id": "u"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"something_new": 1},
    ],
)
def test_what_does_not_change_the_answer_is_ignored(fields: dict[str, Any]) -> None:
    assert generation(**fields) == generation()


def test_counting_takes_no_max_tokens() -> None:
    request = decode_fields(
        CountTokensRequest, msgspec.json.encode({"model": "tiny", "messages": [USER], "tools": [WEATHER]})
    )
    assert to_prompt(request).tools[0].name == "get_weather"
    assert to_prompt(request).max_tokens is None


def test_an_id_may_come_again() -> None:
    """Models number their calls from zero in each answer: a result is that of the call before it."""
    found = generation(
        messages=[
            USER,
            assistant(call("0", "get_weather")),
            user(answer("0")),
            assistant(call("0", "get_time")),
            user(answer("0")),
        ]
    ).messages
    assert [turn.name for turn in found if turn.role == "tool"] == ["get_weather", "get_time"]


def test_a_deferred_tool_is_offered_once_the_clients_search_has_found_it() -> None:
    """As Claude Code sends them. Where Anthropic's servers would search, nothing here does: all are offered."""
    search = {**WEATHER, "name": "ToolSearch"}
    deferred = {**WEATHER, "defer_loading": True}
    tools = [search, deferred]
    assert [tool.name for tool in generation(tools=tools).tools] == ["ToolSearch"]
    found = answer("t1", [{"type": "tool_reference", "tool_name": "get_weather"}])
    request = generation(tools=tools, messages=[USER, assistant(call("t1", "ToolSearch")), user(found)])
    assert [tool.name for tool in request.tools] == ["ToolSearch", "get_weather"]
    assert request.messages[-1].text() == "The tool get_weather is available."
    hosted = {"type": "tool_search_tool_regex_20251119", "name": "search"}
    assert [tool.name for tool in generation(tools=[hosted, deferred]).tools] == ["get_weather"]
