"""Tools as agents offer them: in namespaces, with grammars, next to tools that only OpenAI's servers run."""

from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.responses_encoder import ResponsesEncoder, new_resource
from headwater.actors.edge.apis.responses_requests import ToolSet, generation_request
from headwater.actors.edge.apis.responses_types import CreateFields
from headwater.actors.edge.parsing.grammar import ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from headwater.actors.edge.prompt.request import GenerationRequest
from tests.support.worlds.edge import EdgeWorld
from tests.unit.actors.edge.apis.responses.asking import USER, create, error_of
from tests.unit.actors.edge.apis.responses.test_encoder import START, Names

CLOSE = {"type": "function", "name": "close", "description": "Closes one.", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [CLOSE]}
FILES = {"type": "namespace", "name": "files", "tools": [CLOSE]}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'},
}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "mcp", "server_label": "x"},
    {"type": "local_shell"},
]


def translated(**fields: Any) -> tuple[CreateFields, GenerationRequest, ToolSet]:
    given = msgspec.convert({"model": "m", "input": "Hello.", **fields}, CreateFields)
    return given, *generation_request(given, (), given.items(), START.id, stream=True)


def test_functions_of_a_namespace_are_functions() -> None:
    """Two namespaces may have a function of one name, which is also one outside of both."""
    _, request, tools = translated(tools=[CLOSE, AGENTS, FILES])
    assert [tool.name for tool in request.tools] == ["close", "agents__close", "files__close"]
    assert request.tools[1].description == "Agents.\nCloses one."
    assert request.tools[2].description == "Closes one."
    assert tools.echo[1:] == [AGENTS, FILES]


def test_a_call_comes_back_under_its_own_name_and_namespace() -> None:
    fields, _, tools = translated(tools=[CLOSE, AGENTS])
    encoder = ResponsesEncoder(
        new_resource(fields, START.id, tools.echo, {}, stored=True),
        Names(),
        lambda: 5,
        tools,
    )
    encoder.start(START)
    found = []
    for number, name in enumerate(("agents__close", "close")):
        encoder.delta(0, ToolCallStart(number, name, f"call_{number}"), None)
        encoder.delta(0, ToolArgumentsDelta(number, "{}"), None)
        found.append(encoder.delta(0, ToolCallEnd(number), None))
    first, second = (msgspec.json.decode(one.rstrip().rpartition(b"data: ")[2])["item"] for one in found)
    assert (first["name"], first["namespace"]) == ("close", "agents")
    assert second["name"] == "close"
    assert "namespace" not in second


def test_a_call_of_the_history_has_the_models_name() -> None:
    """The same one in every request, whether the namespace is still on offer or not."""
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "close",
        "namespace": "agents",
        "arguments": "{}",
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "closed"}
    for tools in ([AGENTS], []):
        _, request, _ = translated(input=[USER, call, result], tools=tools)
        assert request.messages[1].calls[0].name == "agents__close"


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ({"type": "function", "name": "close", "namespace": "agents"}, "named", "agents__close"),
        ({"type": "function", "name": "close"}, "named", "close"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "close", "namespace": "agents"}]},
            "auto",
            "",
        ),
    ],
)
def test_a_choice_names_the_namespace(choice: dict[str, Any], mode: str, name: str) -> None:
    _, request, _ = translated(tools=[CLOSE, AGENTS], tool_choice=choice)
    assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)
    if mode == "auto":
        assert [tool.name for tool in request.tools] == ["agents__close"]


def test_a_grammar_is_described() -> None:
    _, request, tools = translated(tools=[PATCH])
    assert request.tools[0].description.endswith('conforms to this grammar (lark):\nstart: "a"+')
    assert tools.custom == {"patch"}


def test_tools_that_nothing_here_runs_are_left_out_and_named(edge: EdgeWorld) -> None:
    """Of all three APIs, streamed and whole; the response shows them among its tools, as the client sent them."""
    for stream in (False, True):
        made = create(edge, tools=HOSTED, stream=stream)
        assert made.headers[b"x-headwater-omitted-tools"] == b"local_shell, mcp, web_search"
    assert create(edge, tools=HOSTED).document["tools"] == HOSTED
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    asked = edge.ask("/v1/chat/completions", {**chat, "tools": [{"type": "web_search"}]})
    assert asked.headers[b"x-headwater-omitted-tools"] == b"web_search"
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    assert edge.ask("/v1/messages", {**chat, "tools": [hosted]}).headers[b"x-headwater-omitted-tools"] == (
        b"web_search_20250305"
    )
    assert b"x-headwater-omitted-tools" not in edge.ask("/v1/chat/completions", chat).headers


def test_an_operator_may_refuse_them() -> None:
    with EdgeWorld(hosted_tools="reject") as edge:
        error = error_of(create(edge, tools=HOSTED))
        assert (error["param"], error["code"]) == ("tools", "hosted_tools")
        assert "web_search" in error["message"]
        assert create(edge).status == 200


def test_steps_of_tools_that_other_servers_ran_are_no_part_of_the_prompt(edge: EdgeWorld) -> None:
    """A conversation that began elsewhere is continued here; they are listed as they came."""
    steps: list[dict[str, Any]] = [
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "q"},
        },
        {"type": "mcp_list_tools", "server_label": "x", "tools": []},
        {"type": "local_shell_call_output", "call_id": "c", "output": "{}"},
    ]
    plain = create(edge, input=[USER])
    made = create(edge, input=[USER, *steps])
    assert made.status == 200, made.body
    assert made.document["usage"]["input_tokens"] == plain.document["usage"]["input_tokens"]
    listed = edge.ask(f"/v1/responses/{made.document['id']}/input_items", b"", method="GET").document["data"]
    assert [one["type"] for one in listed] == [step["type"] for step in reversed(steps)] + ["message"]
    assert all(one["id"] for one in listed)


def test_tools_may_be_an_item_of_the_conversation() -> None:
    """As Codex sends all of them under its newest models' names; they are no turn, and a tool that comes twice is one."""
    added = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [AGENTS, CLOSE]}
    _, request, tools = translated(input=[added, USER], tools=[CLOSE])
    assert [tool.name for tool in request.tools] == ["close", "agents__close"]
    assert tools.namespaces == {"agents__close": ("agents", "close")}
    assert [turn.role for turn in request.messages] == ["user"]
    fields = msgspec.convert({"model": "m", "input": [USER]}, CreateFields)
    later, _ = generation_request(fields, [added], fields.items(), START.id, stream=True)
    assert [tool.name for tool in later.tools] == ["agents__close", "close"]


def test_messages_of_one_agent_to_another_are_a_users() -> None:
    """As Codex writes tasks and answers of its agents: nothing here encrypts what it calls encrypted."""
    sent = {
        "type": "agent_message",
        "id": "amsg_1",
        "author": "/root",
        "recipient": "/root/second",
        "content": [
            {"type": "input_text", "text": "Sender: /root\nPayload:\n"},
            {"type": "encrypted_content", "encrypted_content": "Look into it"},
        ],
    }
    _, request, _ = translated(input=[USER, sent])
    assert [(turn.role, turn.text()) for turn in request.messages][1:] == [
        ("user", "Sender: /root\nPayload:\nLook into it")
    ]


@pytest.mark.parametrize("part", [{"type": "encrypted_content"}, {"type": "input_image", "image_url": "x"}])
def test_other_parts_of_an_agents_message_are_named(edge: EdgeWorld, part: dict[str, Any]) -> None:
    refused = create(edge, input=[{"type": "agent_message", "content": [part]}])
    assert refused.status == 400
    assert "input" in refused.document["error"]["param"]


def test_deferred_tools_are_offered() -> None:
    """Nothing here searches for tools: all are in the prompt."""
    _, request, _ = translated(tools=[{"type": "tool_search"}, {**CLOSE, "defer_loading": True}])
    assert [tool.name for tool in request.tools] == ["close"]
    assert request.omitted_tools == ("tool_search",)


def test_which_reasoning_a_prompt_shows_is_its_templates(edge: EdgeWorld) -> None:
    """Codex sends this with every request."""
    for context in ("auto", "current_turn", "all_turns"):
        assert create(edge, reasoning={"effort": "low", "context": context}).status == 200
