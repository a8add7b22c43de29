"""The form that a template renders, found by rendering: one small template for each way of published ones."""

import json
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.chat_template import ChatTemplate, LiteralText
from headwater.actors.edge.prompt.conversation import template_messages
from headwater.actors.edge.prompt.prompts import render
from headwater.actors.edge.prompt.request import GenerationRequest, TextPart, Tool, ToolCall, Turn
from headwater.actors.edge.template_form import WHOLE
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.engines.model_files import byte_model_files
from tests.templates.conversations import as_chat
from tests.templates.judge import judge, renders
from tests.templates.shapes import SHAPES, Shape

HEAD = "{% if tools %}{% for tool in tools %}[tool {{ tool | tojson }}]{% endfor %}{% endif %}"
CALLS = (
    "{% for call in m.tool_calls or [] %}[call {{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}"
)
EACH = "{% for m in messages %}"
PLAIN = "[{{ m.role }}]{% if m.content is not none %}{{ m.content }}{% endif %}"
END = "{% endfor %}"
WHOLE_TEMPLATE = HEAD + EACH + PLAIN + CALLS + END

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything": (WHOLE_TEMPLATE, {}),
    "content is a text": (
        HEAD + EACH + "[{{ m.role }}]{{ m.content + '' }}" + CALLS + END,
        {"call_content": "empty"},
    ),
    "content is shown as it is": (
        HEAD
        + EACH
        + "[{{ m.role }}]{% if m.content is defined and m.content != '' %}{{ m.content }}{% elif m.content == '' and m.role == 'assistant' %}"
        "{{ raise_exception('empty') }}{% endif %}" + CALLS + END,
        {"call_content": "absent", "empty_assistant": False},
    ),
    "no text before calls": (
        HEAD
        + EACH
        + "[{{ m.role }}]{% if m.tool_calls %}"
        + CALLS
        + "{% else %}{{ m.content }}{% endif %}"
        + END,
        {"text_with_calls": False, "reasoning_with_text": False},
    ),
    "text or thoughts": (
        HEAD
        + EACH
        + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        + PLAIN
        + CALLS
        + END,
        {"reasoning_with_text": False},
    ),
    "arguments are a text": (
        WHOLE_TEMPLATE.replace(
            "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
        ),
        {"arguments_as_text": True},
    ),
    "one call": (
        WHOLE_TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        {"several_calls": False},
    ),
    "short ids": (
        WHOLE_TEMPLATE.replace(
            "[call ", "{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}[call "
        ),
        {"ids_short": True},
    ),
    "one system message": (
        HEAD
        + EACH
        + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}{% endif %}"
        "{% if m.role == 'developer' %}{{ raise_exception('role') }}{% endif %}" + PLAIN + CALLS + END,
        {"developer": False, "several_systems": False, "late_system": False},
    ),
    "no system message": (
        HEAD + EACH + "{% if m.role not in ['system', 'developer'] %}" + PLAIN + CALLS + "{% endif %}" + END,
        {
            "system": False,
            "developer": False,
            "several_systems": False,
            "late_system": False,
            "system_with_calls": False,
        },
    ),
    "roles alternate": (
        HEAD
        + EACH
        + "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('roles') }}{% endif %}"
        + PLAIN
        + CALLS
        + END,
        {"joins": True, "several_systems": False, "several_calls": False},
    ),
    "no calls": (EACH + PLAIN + END, {"calls": False, "tools": False}),
    "neither calls nor results": (
        EACH + "{% if m.role == 'tool' %}{{ raise_exception('role') }}{% endif %}" + PLAIN + END,
        {"calls": False, "results": False, "tools": False},
    ),
    "content is a list": (
        HEAD
        + EACH
        + "[{{ m.role }}]{% for part in m.content or [] %}{{ part.text }}{% endfor %}"
        + CALLS
        + END,
        {"parts": True},
    ),
    "tools are a list": (
        "{% for tool in tools %}[tool {{ tool | tojson }}]{% endfor %}" + EACH + PLAIN + CALLS + END,
        {"empty_tools": True},
    ),
    "tools of another name": (
        WHOLE_TEMPLATE.replace("tools %}", "xml_tools %}"),
        {"tool_variables": ("xml_tools",)},
    ),
    "tools are JSON in a text, and there is a date": (
        "[{{ datetime + functions }}]" + EACH + PLAIN + CALLS + END,
        {"tool_variables": ("functions",), "tools_as_json": True},
    ),
}


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_template_renders_is_found(kind: str) -> None:
    source, wanted = FORMS[kind]
    assert ChatTemplate(source, {}).form == WHOLE._replace(**wanted)


@pytest.mark.parametrize("kind", FORMS)
def test_no_word_is_lost(kind: str) -> None:
    """Whatever a template renders, each conversation is in its prompt."""
    template = ChatTemplate(FORMS[kind][0], {})
    rendered = renders(template)
    problems = {
        name: problem for name, shape in SHAPES.items() if (problem := judge(rendered, as_chat(shape)))
    }
    assert not problems


def test_a_template_that_renders_nothing_keeps_its_complaint() -> None:
    """It is one for the operator: the model's own file is broken."""
    assert ChatTemplate("{{ raise_exception('never') }}", {}).form == WHOLE


def test_ids_are_the_same_in_call_and_result() -> None:
    """And those that fit already are kept."""
    template = ChatTemplate(
        FORMS["short ids"][0].replace("[{{ m.role }}]", "[{{ m.role }} {{ m.tool_call_id }}]"), {}
    )
    literal = LiteralText(Tokenizer(byte_model_files("m").tokenizer))
    text = render(request(SHAPES["two calls at once"]), template, literal, False)
    first, second = (piece.split()[0] for piece in text.split("[call ")[1:])
    assert first != second
    assert f"[tool {first}]resultword" in text
    assert f"[tool {second}]secondword" in text


def request(shape: Shape) -> GenerationRequest:
    return GenerationRequest(model="m", param="messages", messages=shape.turns, tools=shape.tools)


def test_a_result_has_the_name_of_the_last_call_with_its_id() -> None:
    """Models number their calls from zero in each answer."""
    turns = [
        Turn(role="user", parts=(TextPart("Hi"),)),
        Turn(role="assistant", calls=(ToolCall("0", "first", "{}"),)),
        Turn(role="tool", call_id="0", parts=(TextPart("one"),)),
        Turn(role="assistant", calls=(ToolCall("0", "second", "{}"),)),
        Turn(role="tool", call_id="0", parts=(TextPart("two"),)),
    ]
    names = [one["name"] for one in template_messages(turns) if one["role"] == "tool"]
    assert names == ["first", "second"]
    texts = [one["content"] for one in template_messages(turns, WHOLE._replace(calls=False, results=False))]
    assert [text.partition(":")[0] for text in texts if text.startswith("Result")] == [
        "Result of first",
        "Result of second",
    ]


@pytest.mark.parametrize("kind", ["no calls", "neither calls nor results", "text or thoughts"])
def test_what_becomes_text_spells_no_control_tokens(kind: str) -> None:
    """Calls, definitions and reasoning: as where the template has a place for them."""
    spelled = "<|im_start|>"
    tokenizer = Tokenizer(byte_model_files("m").tokenizer, ())
    assert tokenizer.control.split(f"a{spelled}b", 10) == ["a", spelled, "b"]
    call = ToolCall("c", "f", json.dumps({"text": spelled}))
    asked = GenerationRequest(
        model="m",
        param="messages",
        messages=(
            Turn(role="user", parts=(TextPart("Hi"),)),
            Turn(role="assistant", parts=(TextPart("said"),), calls=(call,), reasoning=spelled),
            Turn(role="tool", call_id="c", parts=(TextPart(spelled),)),
        ),
        tools=(Tool("f", f"Reads {spelled}."),),
    )
    template = ChatTemplate(FORMS[kind][0], {})
    literal = LiteralText(tokenizer)
    assert spelled in render(asked, template, literal, False)
    assert spelled not in render(asked, template, literal, True)


def test_results_come_in_the_order_of_their_calls() -> None:
    """A template that renders no ids says by the order only which result belongs to which call."""
    calls = tuple(ToolCall(id=name, name=name, arguments="{}") for name in ("first", "second"))
    asked = Turn(role="user", parts=(TextPart("go"),))
    said = Turn(role="user", parts=(TextPart("wait"),))
    called = Turn(role="assistant", calls=calls)
    results = [Turn(role="tool", call_id=one, parts=(TextPart(one),)) for one in ("second", "first")]
    sent = [asked, called, results[0], said, results[1]]
    contents = [message["content"] for message in template_messages(sent)]
    assert contents == ["go", None, "first", "second", "wait"]
    unknown = msgspec.structs.replace(results[1], call_id="third")
    contents = [message["content"] for message in template_messages([asked, called, results[0], unknown])]
    assert contents == ["go", None, "second", "first"]
    twice = Turn(role="assistant", calls=(calls[0], calls[0]))
    contents = [message["content"] for message in template_messages([asked, twice, *results[1:], results[1]])]
    assert contents == ["go", None, "first", "first"]
