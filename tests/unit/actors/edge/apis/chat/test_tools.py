"""Tools and reasoning in chat completions through the whole edge: the prompt, the constraint, the answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.model_files import byte_model_files
from headwater.schemas.inference import Guide
from tests.support.data.tools import SCHEMA, TIME, WEATHER, events_of, hermes, joined_choices
from tests.support.worlds.edge import EdgeWorld

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.name }}){% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "Weather in Zürich?"}
CALL = hermes("get_weather", city="Zürich")
OTHER_CALL = hermes("get_time")


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """Beside the model without any format one that calls tools and one that reasons as well."""
    files = byte_model_files("agent")._replace(chat_template=TEMPLATE)
    with EdgeWorld(frame_tokens=3) as world:
        world.serve("agent", files, tool_parser="hermes")
        world.serve("thinker", files._replace(name="thinker"), tool_parser="hermes", reasoning_parser="think")
        yield world


def chat(edge: EdgeWorld, answer: str, **fields: Any) -> dict[str, Any]:
    """The choice with which a request is answered, asked for whole and as a stream: both are the same."""
    edge.says(answer)
    sent = {"model": "agent", "messages": [USER], "tools": [WEATHER, TIME], "max_tokens": 900, **fields}
    whole = edge.ask(CHAT, sent)
    assert whole.status == 200, whole.body
    streamed = edge.ask(CHAT, {**sent, "stream": True})
    found = joined_choices(events_of(streamed.body))[0]
    choice: dict[str, Any] = whole.document["choices"][0]
    expected = {name: value for name, value in choice["message"].items() if value is not None}
    assert _without_ids(found["message"]) == _without_ids({"content": "", **expected})
    assert found["finish_reason"] == choice["finish_reason"]
    return choice


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def refused(edge: EdgeWorld, **fields: Any) -> dict[str, Any]:
    """The error object of a request that is refused with 400."""
    return edge.refused(CHAT, {"model": "agent", "messages": [USER], **fields})


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GUIDED = '{"city": "Zürich"}'
ALWAYS_OPENS = TEMPLATE.replace("{% if enable_thinking %}<think>\n{% endif %}", "<think>\n")
SWITCHED = TEMPLATE.replace(
    "{% if enable_thinking %}", "{% if enable_thinking is not defined or enable_thinking %}"
)


@pytest.mark.parametrize(
    "template", [ALWAYS_OPENS, SWITCHED], ids=["always opens reasoning", "unless switched off"]
)
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_an_answer_that_conforms_to_a_guide_is_no_reasoning(
    edge: EdgeWorld, template: str, kind: str
) -> None:
    """It holds from the first token on: also of a model whose prompt opens reasoning, in all three APIs, whole and streamed."""
    files = byte_model_files("agent")._replace(chat_template=template, name="guided")
    edge.serve("guided", files, reasoning_parser="think")
    form: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        form["json_schema"] = {"name": "place", "schema": PLACE}
    choice = chat(edge, GUIDED, model="guided", tools=[], response_format=form)
    assert choice["message"]["content"] == GUIDED
    assert not choice["message"].get("reasoning_content")
    text = {"format": {"type": kind, **({"name": "place", "schema": PLACE} if kind == "json_schema" else {})}}
    made = edge.ask("/v1/responses", {"model": "guided", "input": "Where?", "text": text})
    assert [item["type"] for item in made.document["output"]] == ["message"]
    assert made.document["output"][0]["content"][0]["text"] == GUIDED
    if kind == "json_schema":
        wanted = {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}, "max_tokens": 99}
        said = edge.ask("/v1/messages", {"model": "guided", "messages": [USER], **wanted})
        assert [(block["type"], block["text"]) for block in said.document["content"]] == [("text", GUIDED)]


def test_without_a_guide_the_prompt_still_opens_reasoning(edge: EdgeWorld) -> None:
    """The guide, and nothing else, switches it off."""
    files = byte_model_files("agent")._replace(chat_template=SWITCHED, name="free")
    edge.serve("free", files, reasoning_parser="think")
    message = chat(edge, "hm</think>It is dry.", model="free", tools=[])["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "It is dry.")


def test_a_call_is_found_in_the_answer(edge: EdgeWorld) -> None:
    """With an id of ours, its arguments as JSON text and no content."""
    choice = chat(edge, CALL)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}


def test_parallel_calls_have_ids_of_their_own(edge: EdgeWorld) -> None:
    """Text before them stays content; without parallel_tool_calls only the first counts."""
    both = chat(edge, f"I look. {CALL}\n{OTHER_CALL}")["message"]
    assert both["content"].strip() == "I look."
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["get_weather", "get_time"]
    assert len({call["id"] for call in both["tool_calls"]}) == 2
    one = chat(edge, f"{CALL}\n{OTHER_CALL}", parallel_tool_calls=False)["message"]
    assert [call["function"]["name"] for call in one["tool_calls"]] == ["get_weather"]


def test_the_template_sees_tools_calls_and_results(edge: EdgeWorld) -> None:
    """Arguments as an object; a result with the name of its function; nothing of it with tool_choice none."""
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
    ]
    chat(edge, "Cold.", messages=messages)
    prompt = edge.prompt()
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "get_weather"')
    assert '<think>hm</think>[get_weather {"city": "Rome"}]' in prompt
    assert "12 °C(get_weather)" in prompt
    assert chat(edge, CALL, tool_choice="none")["message"]["content"] == CALL
    assert "<tools>" not in edge.prompt()


@pytest.mark.parametrize(
    ("choice", "answer", "names"),
    [
        ("required", '[{"name": "get_time", "parameters": {}}]', ["get_time"]),
        ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Bern"}', ["get_weather"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
            '[{"name": "get_weather", "parameters": {"city": "Bern"}}]',
            ["get_weather"],
        ),
    ],
)
@pytest.mark.parametrize("model", ["m", "agent"])
def test_a_demanded_call_is_structured_output(
    edge: EdgeWorld, model: str, choice: Any, answer: str, names: list[str]
) -> None:
    """For models without a format too: the engine gets the schema, and the answer is read as that."""
    found = chat(edge, answer, model=model, tool_choice=choice)
    assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == names
    assert found["finish_reason"] == "tool_calls"
    guide = edge.given[-1].sampling.guide
    assert guide is not None
    assert guide.kind == "json_schema"
    assert edge.queries[-1].constraints.needs == ("guide",)
    if isinstance(choice, dict) and choice["type"] == "function":
        assert guide == Guide("json_schema", json.dumps(SCHEMA, separators=(",", ":")))


def test_a_call_that_is_cut_off_says_so(edge: EdgeWorld) -> None:
    """The limit of tokens is the reason, not the call."""
    found = chat(edge, CALL, max_tokens=40)
    assert found["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"model": "m", "tools": [WEATHER]}, "tools", "--tool-parser"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "functions"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "named"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ""),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": ["function"]}}, "tool_choice", "allowed_tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "not among",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            },
            "tool_choice",
            "allowed_tools",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "type must be",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(
    edge: EdgeWorld, fields: dict[str, Any], param: str, says: str
) -> None:
    error = refused(edge, **fields)
    assert error["param"] == param
    assert says in error["message"]


def test_reasoning_has_fields_of_its_own(edge: EdgeWorld) -> None:
    """Both names; counted in the usage; not shown to a client that does not want it."""
    answer = "<think>\nTwo and two.\n</think>\n\nFour."
    found = chat(edge, answer, model="thinker", tools=None)["message"]
    assert found["content"] == "Four."
    assert found["reasoning_content"] == found["reasoning"] == "Two and two."
    usage = edge.ask(CHAT, {"model": "thinker", "messages": [USER], "max_tokens": 900}).document["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len("Two and two.") <= reasoning < usage["completion_tokens"]
    hidden = chat(edge, answer, model="thinker", include_reasoning=False)["message"]
    assert set(hidden) == {"role", "content", "refusal"}


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"enable_thinking": True}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, False),
        ({}, False),
    ],
)
def test_the_template_is_told_whether_to_reason(
    edge: EdgeWorld, fields: dict[str, Any], thinks: bool
) -> None:
    """Where the prompt ends inside reasoning, the answer begins there."""
    answer = "So.</think>Four." if thinks else "Four."
    message = chat(edge, answer, model="thinker", tools=None, **fields)["message"]
    assert edge.prompt().endswith("<think>\n") == thinks
    assert message["content"] == "Four."
    assert message.get("reasoning") == ("So." if thinks else None)


def test_a_budget_needs_an_engine_or_a_template_that_knows_it(edge: EdgeWorld) -> None:
    """As the client demands it; as part of `thinking` it is a hint."""
    assert refused(edge, thinking_token_budget=64)["param"] == "thinking_token_budget"
    chat(edge, "x", thinking={"type": "disabled", "budget_tokens": 9})


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "I look. ",
                CALL,
                OTHER_CALL,
                "\n",
                "<think>",
                "</think>",
                "<tool_call>",
                "{",
                '"a"',
                "é🙂",
                "<|im_start|>",
            ]
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=20)
def test_a_stream_adds_up_to_the_whole_answer(edge: EdgeWorld, pieces: list[str]) -> None:
    """Whatever the model writes; `chat` compares."""
    chat(edge, "".join(pieces), model="thinker")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "<|im_end|>"}],
        [
            {"role": "user", "content": "a", "name": "<|im_end|>"},
            {"role": "tool", "tool_call_id": "x", "content": "<|im_end|>"},
        ],
        [USER, {"role": "assistant", "content": "a", "reasoning": "<|im_end|>"}, USER],
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "1",
                        "function": {"name": "<|im_end|>", "arguments": '{"<|im_end|>": "<|im_end|>"}'},
                    }
                ],
            },
        ],
    ],
)
def test_control_tokens_that_a_client_spells_are_text(
    edge: EdgeWorld, messages: list[dict[str, Any]]
) -> None:
    """In tool results, names, reasoning, calls and tool definitions."""
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "<|im_end|>", "parameters": {"a": "<|im_end|>"}},
    }
    edge.says("x")
    response = edge.ask(CHAT, {"model": "agent", "messages": messages, "tools": [tool]})
    assert response.status == 200, response.body
    spelled = edge.prompt().count("<|im_end|>")
    end = byte_model_files("x").eos_token_ids[0]
    packed = memoryview(edge.given[-1].tokens).cast("I")
    assert packed.tolist().count(end) == len(messages)
    assert spelled > len(messages)
