"""Chat templates: what Hugging Face's templates rely on, complaints to the client, and the sandbox."""

import contextlib
import json
from datetime import datetime
from typing import Any

import pytest

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.actors.http.errors import ApiError
from headwater.engines.model_files import BYTE_TEMPLATE

USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def render(
    source: str,
    messages: list[dict[str, Any]] | None = None,
    special: dict[str, str] | None = None,
    **more: Any,
) -> str:
    """A template's text; `more` are a request's own variables."""
    return ChatTemplate(source, special or {}).render(USER if messages is None else messages, variables=more)


def refusal(source: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        render(source)
    return caught.value


def test_messages_become_the_models_prompt() -> None:
    """Roles and texts in order, then the beginning of an answer unless that is not wanted."""
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render(BYTE_TEMPLATE, messages) == turns + "<|im_start|>assistant\n"
    assert ChatTemplate(BYTE_TEMPLATE, {}).render(messages, add_generation_prompt=False) == turns


def test_special_tokens_and_further_variables_are_visible() -> None:
    """`chat_template_kwargs` of a request win over the model's own values."""
    source = "{{ bos_token }}{{ thinking | default('off') }}"
    assert render(source, special={"bos_token": "<s>"}) == "<s>off"
    assert render(source, special={"bos_token": "<s>"}, thinking="on") == "<s>on"
    assert render("{{ bos_token }}", special={"bos_token": "<s>"}, bos_token="<b>") == "<b>"


def test_a_templates_own_complaint_is_told_to_the_client() -> None:
    """`raise_exception` is a 400 about the messages, with the template's words."""
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert (error.status, error.param) == (400, "messages")
    assert "roles must alternate" in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[7]['role'] }}",
        "{{ '{} {}'.format(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0]['content'].no_such_method() }}",
        "{{ strftime_now(3) }}",
        "{{ 'a'.encode('no-such-encoding') }}",
        "{% for n in range(10 ** 9) %}{{ n }}{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_breaks_on_the_messages_is_a_400(source: str) -> None:
    """Whatever goes wrong inside of a template is never the edge's failure."""
    assert refusal(source).status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '' | attr('__class__') | attr('__mro__') }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
        "{% set x = messages.clear() %}",
    ],
)
def test_the_sandbox_lets_nothing_out_and_nothing_be_changed(source: str) -> None:
    """A template comes with a model and is not trusted: Python's insides and the messages are out of reach."""
    messages = [{"role": "user", "content": "hi"}]
    text = ""
    with contextlib.suppress(ApiError):
        text = render(source, messages)
    assert not any(secret in text for secret in ("<class", "<function", "wrapper", "built-in", "{'"))
    assert messages == [{"role": "user", "content": "hi"}]


def test_tojson_writes_what_models_were_trained_on() -> None:
    """Plain JSON: no HTML escapes, no ASCII escapes unless asked for, and the options templates use."""
    value = {"b": "<é & 'q'>", "a": [1, None, True]}
    messages = [{"role": "user", "content": value}]
    assert render("{{ messages[0].content | tojson }}", messages) == json.dumps(value, ensure_ascii=False)
    assert render("{{ messages[0].content | tojson(indent=2) }}", messages) == json.dumps(
        value, ensure_ascii=False, indent=2
    )
    assert render(
        "{{ messages[0].content | tojson(sort_keys=true, separators=(',', ':')) }}", messages
    ) == json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    assert "\\u00e9" in render("{{ messages[0].content | tojson(ensure_ascii=true) }}", messages)


def test_texts_are_not_escaped() -> None:
    """A prompt is no HTML."""
    text = "<b> & \"quotes\" 'too' {{ no }} 🙂"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_blocks_leave_no_blank_lines() -> None:
    """Lines of template code do not show, as in Hugging Face's own rendering."""
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render(source, [{"content": "a"}, {"content": "b"}]) == "a\nb\nend"


def test_loops_may_be_left_and_generation_marks_pass_through() -> None:
    """`break`, `continue` and `{% generation %}` are known."""
    loop = (
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 3 %}{% break %}{% endif %}"
    )
    assert render(loop + "{{ n }}{% endfor %}") == "02"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_the_date_can_be_asked_for() -> None:
    """`strftime_now`, as newer templates use it."""
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "self", "environment", "loop", "range"]
)
def test_no_variable_of_a_request_can_take_the_place_of_its_messages(name: str) -> None:
    """`chat_template_kwargs` may hold any name: the messages stay what they are."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(USER, variables={name: 1}) == "hi"


def test_messages_of_any_json_shape_are_rendered_or_refused() -> None:
    """Missing content, lists, tool calls: the template decides, and nothing but ApiError is raised."""
    for message in ({}, {"role": "tool"}, {"role": "x", "content": ["a", {"b": 1}]}, {"content": 3}):
        with contextlib.suppress(ApiError):
            render(BYTE_TEMPLATE, [message])
