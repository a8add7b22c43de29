"""What a chat template renders, found by rendering small conversations with it once, when its model is loaded.

Templates differ in what they take: some fail at a call without text, lose a second system message, demand that roles alternate, or know
no calls at all. None of this is declared anywhere. `headwater.actors.edge.prompt.conversation` puts a conversation into this form.
"""

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, Literal, NamedTuple

from headwater.actors.http.errors import ApiError

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None, "TemplateForm"], str]
"""Renders messages and tools, which are in this form; raises `ApiError` where the template cannot."""

CallContent = Literal["null", "empty", "absent"]

ID_CHARACTERS: Final = 9
"""Mistral's templates demand ids of this many letters and digits."""


class TemplateForm(NamedTuple):
    """What a template renders. The defaults are those of one that renders everything.

    `parts`: content is a list of parts, never a text. `results` without `calls`: messages of role tool are rendered.
    `several_systems`, `late_system`: system messages are rendered in their places, at the beginning and behind other messages;
    `system_with_calls`: also where the last message is no user's. `joins`: neighbours of one role have to be one message.
    `call_content` is the content of a message that only calls; `text_with_calls`: what the model said before its calls is
    rendered before them; `spoken_calls`: it is so, or as a message of its own, once an answer follows; and `reasoning_with_text`
    what it thought before that. `ids_short`: ids of calls must have `ID_CHARACTERS` letters and digits. `descriptions`: each
    parameter of a tool must have one. `empty_tools`: it needs a list of tools where none are offered; `tool_variables` are
    further names under which it expects them, `tools_as_json` if as one text.
    """

    parts: bool = False
    system: bool = True
    system_with_calls: bool = True
    developer: bool = True
    several_systems: bool = True
    late_system: bool = True
    joins: bool = False
    empty_assistant: bool = True
    calls: bool = True
    results: bool = True
    call_content: CallContent = "null"
    text_with_calls: bool = True
    spoken_calls: bool = True
    reasoning_with_text: bool = True
    arguments_as_text: bool = False
    ids_short: bool = False
    several_calls: bool = True
    user_after_result: bool = True
    tools: bool = True
    empty_tools: bool = False
    tool_variables: tuple[str, ...] = ()
    tools_as_json: bool = False
    descriptions: bool = False


WHOLE: Final = TemplateForm()

_CHANGES: Final = {
    "parts": "content is a list of parts",
    "system": "system messages are a user's, in their place",
    "developer": "developer messages are system messages",
    "several_systems": "system messages at the beginning are one",
    "late_system": "later system messages are a user's, in their place",
    "system_with_calls": "behind a call's result the system message is a user's",
    "joins": "messages in a row of one role are one",
    "empty_assistant": "empty answers are left out",
    "calls": "calls are texts",
    "results": "results of calls are a user's texts",
    "text_with_calls": "what precedes a call is a message of its own",
    "spoken_calls": "calls that something was said before are texts, and so are their results",
    "reasoning_with_text": "reasoning and what precedes a call are one text",
    "arguments_as_text": "arguments of calls are JSON in a text",
    "ids_short": f"ids of calls are {ID_CHARACTERS} letters and digits",
    "several_calls": "several calls at once are one after the other",
    "user_after_result": "what a user says behind a result is a part of it",
    "tools": "tools are JSON in a system message",
    "descriptions": "parameters of tools without a description get an empty one",
    "empty_tools": "without tools it gets an empty list of them",
}


def changes_of(form: TemplateForm) -> list[str]:
    """Return what is done to conversations so that the template renders them, as sentences for operators."""
    changes = [text for name, text in _CHANGES.items() if getattr(form, name) != getattr(WHOLE, name)]
    if form.calls and form.call_content != "null":
        changes.append(f"the content of a call without text is {form.call_content}")
    as_text = " as JSON in a text" if form.tools_as_json else ""
    return changes + [
        f"the tools are in the variable {name} as well{as_text}" for name in form.tool_variables
    ]


TOOL_VARIABLES: Final = ("xml_tools", "functions")
"""Names that some templates have for the tools."""

REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")
"""Each is used by some templates; those that leave earlier reasoning out use none of them."""

_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"field": {"type": "string"}},
            "required": ["field"],
        },
    },
}
_LEAKS: Final = ("None", "null", "Undefined")
_USER: Final[Message] = {"role": "user", "content": "userword"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "answerword"}
_LATER: Final[Message] = {"role": "user", "content": "laterword"}


def described(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's definition in which each parameter has a description."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    properties = {
        name: {"description": "", **schema} if isinstance(schema, dict) else schema
        for name, schema in (parameters.get("properties") or {}).items()
    }
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


class _Probe:
    """Renders conversations, and looks for the words that have to be in the prompt."""

    def __init__(self, render: Render, form: TemplateForm) -> None:
        self._render = render
        self._form = form
        self._leaks: dict[bool, dict[str, int]] = {}
        self._allowed = 0

    def shows(self, messages: Sequence[Message], *words: str, tools: bool = False) -> bool:
        """Are all words in the prompt, in this order, and nothing that stands for a missing value?"""
        text = self.text(messages, tools=tools)
        calls = sum("tool_calls" in message for message in messages)
        if text is None or self.leaks_in(text, tools=tools) > self._allowed * calls * 2:
            return False
        return self._has(text, words)

    def has(self, messages: Sequence[Message], *words: str, tools: bool = False) -> bool:
        """Are all words in the prompt, in this order?"""
        text = self.text(messages, tools=tools)
        return text is not None and self._has(text, words)

    def leaks_in(self, text: str, *, tools: bool) -> int:
        """Return how many words that stand for missing values are in a prompt, beyond those of a plain message's."""
        leaks = self._base_leaks(tools)
        return sum(max(0, text.count(leak) - leaks[leak]) for leak in _LEAKS)

    def allow_leaks(self, count: int) -> None:
        """Ignore as many with each call and its result, which the template writes whatever the messages are."""
        self._allowed = count

    def _has(self, text: str, words: Sequence[str]) -> bool:
        at = 0
        for word in words:
            at = text.find(word, at)
            if at < 0:
                return False
        return True

    def text(self, messages: Sequence[Message], *, tools: bool = False) -> str | None:
        """The prompt; None if the template cannot render it."""
        tool = described(_TOOL) if self._form.descriptions else _TOOL
        offered = [tool] if tools else [] if self._form.empty_tools else None
        try:
            shaped = [self._shaped(message) for message in messages]
            return self._render(shaped, offered, self._form)
        except ApiError:
            return None

    def _shaped(self, message: Message) -> Message:
        content = message.get("content")
        if self._form.parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _base_leaks(self, tools: bool) -> dict[str, int]:
        if tools not in self._leaks:
            text = self.text([_USER], tools=tools) or ""
            self._leaks[tools] = {leak: text.count(leak) for leak in _LEAKS}
        return self._leaks[tools]


def find_form(render: Render, mentions: Callable[[str], bool]) -> TemplateForm:
    """The form that a template renders. `mentions`: is a word in its source? `WHOLE` for one that renders not even a plain message."""
    names = tuple(name for name in TOOL_VARIABLES if mentions(name))
    for as_json, parts, empty_tools in product(
        (False, True) if names else (False,), (False, True), (False, True)
    ):
        form = WHOLE._replace(parts=parts, empty_tools=empty_tools, tools_as_json=as_json)
        form = form._replace(tool_variables=names if as_json else ())
        if _Probe(render, form).shows([_USER], "userword"):
            break
    else:
        return WHOLE
    if not _Probe(render, form).shows([_USER], "probetool", "userword", tools=True):
        tried = (form._replace(tool_variables=names), form._replace(descriptions=True))
        form = next(
            (
                candidate
                for candidate in tried
                if _Probe(render, candidate).shows([_USER], "probetool", "userword", tools=True)
            ),
            form._replace(tools=False),
        )
    probe = _Probe(render, form)
    form = _with_systems(form, probe)
    form = form._replace(
        joins=not probe.shows([_USER, _LATER], "userword", "laterword")
        or not probe.shows([_USER, _ANSWER, _LATER, _USER], "answerword", "laterword", "userword"),
        empty_assistant=probe.shows(
            [_USER, {"role": "assistant", "content": ""}, _LATER], "userword", "laterword"
        ),
    )
    return _with_calls(form, probe)


def _with_systems(form: TemplateForm, probe: _Probe) -> TemplateForm:
    def said(text: str, role: str = "system") -> Message:
        return {"role": role, "content": text}

    first, second = said("systemword"), said("secondword")
    system = probe.shows([first, _USER], "systemword", "userword")
    # A template may render it as any role's message that it does not know.
    developer = probe.shows(
        [said("systemword", "developer"), _USER], "systemword", "userword"
    ) and probe.shows([first, said("secondword", "developer"), _USER], "systemword", "secondword", "userword")
    both = [first, second, _USER]
    several = system and probe.shows(both, "systemword", "secondword", "userword")
    # Nothing between them makes one word of two.
    several = several and "systemwordsecondword" not in (probe.text(both) or "")
    late = (
        system
        and probe.shows([_USER, _ANSWER, second, _LATER], "answerword", "secondword", "laterword")
        and probe.shows([first, _USER, second], "systemword", "userword", "secondword")
    )
    return form._replace(system=system, developer=developer, several_systems=several, late_system=late)


def call_message(form: TemplateForm, *calls: Message) -> Message:
    """An assistant's message of calls without text."""
    message: Message = {"role": "assistant", "tool_calls": list(calls)}
    if form.call_content != "absent":
        message["content"] = "" if form.call_content == "empty" else None
    return message


def _call(form: TemplateForm, value: str, number: int) -> Message:
    example_arguments = {"key": value}
    arguments: Any = json.dumps(example_arguments) if form.arguments_as_text else example_arguments
    return {
        "id": _id(form, number),
        "type": "function",
        "function": {"name": "probetool", "arguments": arguments},
    }


def _id(form: TemplateForm, number: int) -> str:
    return f"abcdefgh{number}" if form.ids_short else f"call_abcdef_{number}"


def _result(form: TemplateForm, text: str, number: int) -> Message:
    return {"role": "tool", "name": "probetool", "tool_call_id": _id(form, number), "content": text}


def _with_calls(form: TemplateForm, probe: _Probe) -> TemplateForm:
    contents: tuple[CallContent, ...] = ("null", "empty", "absent")
    for short, text in product((False, True), (False, True)):
        forms = [
            form._replace(call_content=content, arguments_as_text=text, ids_short=short)
            for content in contents
        ]
        rendered = [
            (leaks, tried) for tried in forms if (leaks := _leaks_of_a_loop(tried, probe)) is not None
        ]
        if rendered:
            # A template may write such a word itself, with each result: then so it does whatever the content is.
            leaks, best = min(rendered, key=lambda rendering: rendering[0])
            probe.allow_leaks(leaks)
            return _with_several(best, probe)
    result = _result(form, "resultword", 1)
    shown = probe.shows([_USER, _ANSWER, result, _ANSWER, _LATER], "answerword", "resultword", "laterword")
    return form._replace(calls=False, results=shown)


def _leaks_of_a_loop(form: TemplateForm, probe: _Probe) -> int | None:
    """Return how many words that stand for missing values are with a call and its result; None if something of these is lost."""
    call, result = _call(form, "valueword", 1), _result(form, "resultword", 1)
    loop = [_USER, call_message(form, call), result]
    if not probe.has(loop, "userword", "probetool", "valueword", "resultword", tools=form.tools):
        return None
    written = probe.text(loop, tools=form.tools) or ""
    # A dictionary of Python, or a text of JSON written as JSON once more.
    if "{'key'" in written or '\\"key' in written:
        return None
    return probe.leaks_in(written, tools=form.tools)


def _with_several(form: TemplateForm, probe: _Probe) -> TemplateForm:
    calls = [_call(form, "valueword", 1), _call(form, "secondword", 2)]
    results = [_result(form, "resultword", 1), _result(form, "lastword", 2)]
    several = probe.shows(
        [_USER, call_message(form, *calls), *results],
        "valueword",
        "secondword",
        "resultword",
        "lastword",
        tools=form.tools,
    )
    behind = probe.shows(
        [_USER, call_message(form, calls[0]), results[0], _LATER],
        "valueword",
        "resultword",
        "laterword",
        tools=form.tools,
    )
    system = {"role": "system", "content": "systemword"}
    loop = [call_message(form, calls[0]), results[0]]
    spoken = {**loop[0], "content": "answerword"}
    thought = {**spoken, **dict.fromkeys(REASONING_NAMES, "thoughtword")}
    words = ("userword", "answerword", "valueword", "resultword")
    together = probe.shows([_USER, spoken, results[0]], *words, tools=form.tools)
    end = [results[0], {"role": "assistant", "content": "finalword"}, _LATER]
    ended = (*words, "finalword", "laterword")
    if together and not probe.shows([_USER, spoken, *end], *ended, tools=form.tools):
        # A template may take it for reasoning, which it leaves out later.
        together = False
    apart = probe.shows([_USER, _ANSWER, loop[0], *end], *ended, tools=form.tools)
    return form._replace(
        spoken_calls=together or apart,
        several_calls=several,
        user_after_result=behind,
        system_with_calls=probe.shows([system, _USER, *loop], "systemword", "userword", tools=form.tools),
        text_with_calls=together,
        reasoning_with_text=probe.shows([_USER, thought, results[0]], *words, tools=form.tools),
    )
