"""A conversation as a chat template expects it: plain JSON types, with Hugging Face's names, in the form that it renders. Pure."""

import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from headwater.actors.edge.prompt.media import shown_as
from headwater.actors.edge.prompt.request import GenerationRequest, MediaPart, Part, TextPart, ToolCall, Turn
from headwater.actors.edge.template_form import (
    ID_CHARACTERS,
    REASONING_NAMES,
    WHOLE,
    TemplateForm,
    call_message,
)

SEPARATOR: Final = "\n\n"
"""The text between messages that are joined."""

ARGUMENTS: Final = "arguments"
"""The key under which arguments that are no object are in one."""

_LEVELS: Final = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""Efforts in the words of Kimi K3's template, which refuses others."""

TOOLS_HEAD: Final = "Functions that can be called, as JSON:"
"""Precedes the definitions where a template has no place for them."""


def template_messages(
    turns: Sequence[Turn], form: TemplateForm = WHOLE, mark: Callable[[str], str] = str
) -> list[dict[str, Any]]:
    """The messages, in the form that the template renders.

    `mark` replaces control tokens in calls and reasoning that become an assistant's text, whose own control tokens are kept.
    """
    if not form.system_with_calls and turns[-1].role != "user":
        form = form._replace(system=False, late_system=False)
    has_calls = any(turn.calls or turn.role == "tool" for turn in turns)
    shaped = _joined(_without_roles(_results_first(turns) if has_calls else turns, form), form)
    if not has_calls:
        pass
    elif not form.calls:
        shaped = _joined(list(_calls_as_text(shaped, form, mark)), form)
    else:
        if not form.spoken_calls:
            shaped = _joined(list(_spoken_as_text(shaped, form, mark)), form)
        if not form.several_calls:
            shaped = list(_one_call_each(shaped))
        shaped = [split_turn for turn in shaped for split_turn in _spoken_apart(turn, form, mark)]
    called: dict[str, str] = {}
    messages = []
    for turn in shaped:
        messages.append(_message(turn, form, called))
        # In order: a model may write an id again, and a result belongs to the last call that has it.
        called |= {call.id: call.name for call in turn.calls if call.id}
    return messages


def tools_as_text(definitions: Sequence[dict[str, Any]]) -> str:
    """The tools' definitions as a text for the system message."""
    return "\n".join(
        (TOOLS_HEAD, *(json.dumps(definition["function"], ensure_ascii=False) for definition in definitions))
    )


def template_variables(request: GenerationRequest) -> dict[str, Any]:
    """Variables for the template; those that the client names itself win.

    Templates have several names for the switch for reasoning, and for how much of it. What a template does not use has no effect.
    """
    reasoning = request.reasoning
    enabled = reasoning.enabled
    variables: dict[str, Any] = {}
    if reasoning.effort is not None:
        variables |= {"reasoning_effort": reasoning.effort, "reasoning_strength": reasoning.effort}
        if enabled is None and reasoning.effort == "none":
            enabled = False
        if level := _LEVELS.get(reasoning.effort):
            variables["thinking_effort"] = level
    if request.is_guided:
        # A guide holds from the first token on, so the model has no place to reason in.
        enabled = False
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled, "reasoning": enabled}
        variables["thinking_mode"] = "enabled" if enabled else "disabled"
    if request.tool_choice.mode in ("required", "named"):
        variables["tool_choice"] = "required"
    if reasoning.budget is not None:
        variables["thinking_budget"] = reasoning.budget
    return variables | request.prompt_options.variables


def _results_first(turns: Sequence[Turn]) -> list[Turn]:
    """The results of a turn's calls next to these, in the order of the calls: what a user says between them comes behind the last.

    Many templates render no ids, and the model then pairs results with calls by their order.
    """
    ordered: list[Turn] = []
    results: list[Turn] = []
    said: list[Turn] = []
    calls: tuple[ToolCall, ...] = ()
    for turn in turns:
        if turn.role == "assistant":
            ordered += (*_in_order(results, calls), *said, turn)
            results, said, calls = [], [], tuple(turn.calls)
        elif not calls:
            ordered.append(turn)
        elif turn.role == "tool":
            results.append(turn)
        else:
            said.append(turn)
    return [*ordered, *_in_order(results, calls), *said]


def _in_order(results: Sequence[Turn], calls: Sequence[ToolCall]) -> Sequence[Turn]:
    """Results in the order of their calls, or as they are where ids do not say it."""
    order = {call.id: at for at, call in enumerate(calls)}
    if len(order) < len(calls) or any(result.call_id not in order for result in results):
        return results
    return sorted(results, key=lambda result: order[result.call_id])


def _without_roles(turns: Sequence[Turn], form: TemplateForm) -> list[Turn]:
    """The turns without roles that the template loses: system messages in one, in their place as a user's, or in front of the first user's."""
    first = next(
        (at for at, turn in enumerate(turns) if turn.role not in ("system", "developer")), len(turns)
    )
    head: list[Turn] = []
    for turn in turns[:first]:
        turn = _as_system(turn, form)
        if head and not form.several_systems:
            head[-1] = _merged(head[-1], turn)
        else:
            head.append(turn)
    rest = [
        _as_system(turn, form) if form.late_system else _with_role(turn, "user", "system", "developer")
        for turn in turns[first:]
    ]
    if form.system or not head:
        return head + rest
    return [_with_role(turn, "user", "system", "developer") for turn in head] + rest


def _as_system(turn: Turn, form: TemplateForm) -> Turn:
    return turn if form.developer else _with_role(turn, "system", "developer")


def _with_role(turn: Turn, role: Any, *of: str) -> Turn:
    return msgspec.structs.replace(turn, role=role) if turn.role in of else turn


def _joined(turns: Sequence[Turn], form: TemplateForm) -> list[Turn]:
    """Neighbours of one role as one where the template demands that roles alternate; what a user says behind a result as a part of that."""
    joined: list[Turn] = []
    for number, turn in enumerate(turns):
        last = joined[-1] if joined else None
        is_last = number == len(turns) - 1
        if turn.role == "assistant" and not (turn.text() or turn.calls or is_last or form.empty_assistant):
            continue
        if last is None:
            joined.append(turn)
        elif (
            form.joins
            and turn.role == last.role
            and turn.role in ("user", "assistant")
            and not last.calls
            # Otherwise two of a client's own messages would become one that it continues.
            and not (is_last and turn.role == "assistant")
        ) or (not form.user_after_result and turn.role == "user" and last.role == "tool"):
            joined[-1] = _merged(last, turn)
        else:
            joined.append(turn)
    return joined


def _merged(first: Turn, second: Turn) -> Turn:
    """Both as one message of the first's role."""
    between = (TextPart(SEPARATOR),) if first.parts and second.parts else ()
    return msgspec.structs.replace(
        first,
        parts=(*first.parts, *between, *second.parts),
        calls=(*first.calls, *second.calls),
        reasoning="\n".join(filter(None, (first.reasoning, second.reasoning))),
    )


def _calls_as_text(turns: Sequence[Turn], form: TemplateForm, mark: Callable[[str], str]) -> Iterator[Turn]:
    """Calls, and results where they are not rendered, as what model and user say."""
    called: dict[str, str] = {}
    for turn in turns:
        if turn.calls:
            called |= {call.id: call.name for call in turn.calls if call.id}
            texts = [
                json.dumps({"name": call.name, "arguments": _arguments(call)}, ensure_ascii=False)
                for call in turn.calls
            ]
            between = (TextPart("\n"),) if turn.parts else ()
            yield msgspec.structs.replace(
                turn, parts=(*turn.parts, *between, TextPart(mark("\n".join(texts)))), calls=()
            )
        elif turn.role == "tool" and not form.results:
            name = turn.name or called.get(turn.call_id, "")
            head = TextPart(f"Result of {name}:\n" if name else "Result:\n")
            yield msgspec.structs.replace(turn, role="user", parts=(head, *turn.parts), name="", call_id="")
        else:
            yield turn


def _spoken_as_text(turns: Sequence[Turn], form: TemplateForm, mark: Callable[[str], str]) -> Iterator[Turn]:
    """Calls that something was said before, and their results, as what model and user say."""
    remaining = list(turns)
    while remaining:
        turn = remaining.pop(0)
        if not (turn.calls and turn.text()):
            yield turn
            continue
        spoken = [turn]
        while remaining and remaining[0].role == "tool":
            spoken.append(remaining.pop(0))
        yield from _calls_as_text(spoken, form._replace(results=False), mark)


def _one_call_each(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Several calls at once as one after the other, each with its result behind it."""
    remaining = list(turns)
    while remaining:
        turn = remaining.pop(0)
        if len(turn.calls) < 2:
            yield turn
            continue
        results: list[Turn] = []
        while remaining and remaining[0].role == "tool":
            results.append(remaining.pop(0))
        for number, call in enumerate(turn.calls):
            call_result = next((result for result in results if result.call_id == call.id), None)
            if number:
                yield Turn(role="assistant", calls=(call,))
            else:
                yield msgspec.structs.replace(turn, calls=(call,))
            if call_result is not None:
                results.remove(call_result)
                yield call_result
        yield from results


def _spoken_apart(turn: Turn, form: TemplateForm, mark: Callable[[str], str]) -> Iterator[Turn]:
    """A turn of text and calls in the form that loses nothing: with what was thought as a part of the text, or as two messages."""
    if not turn.calls or not turn.text():
        yield turn
        return
    if not form.text_with_calls:
        yield msgspec.structs.replace(turn, calls=())
        yield msgspec.structs.replace(turn, parts=(), reasoning="")
    elif turn.reasoning and not form.reasoning_with_text:
        yield msgspec.structs.replace(
            turn, parts=(TextPart(mark(turn.reasoning)), TextPart(SEPARATOR), *turn.parts), reasoning=""
        )
    else:
        yield turn


def _message(turn: Turn, form: TemplateForm, called: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any]
    if turn.calls and not turn.text() and not any(isinstance(part, MediaPart) for part in turn.parts):
        message = call_message(form)
    else:
        message = {"role": turn.role, "content": _content(turn, form)}
    if turn.name:
        message["name"] = turn.name
    if turn.call_id:
        message["tool_call_id"] = _call_id(turn.call_id, form)
        if turn.call_id in called:
            # Some templates identify a result by the function's name only.
            message.setdefault("name", called[turn.call_id])
    if turn.calls:
        message["tool_calls"] = [_call(call, form) for call in turn.calls]
    if turn.reasoning:
        message |= dict.fromkeys(REASONING_NAMES, turn.reasoning)
    return message


def _content(turn: Turn, form: TemplateForm) -> Any:
    if form.parts or any(isinstance(part, MediaPart) for part in turn.parts):
        return [_part(part) for part in turn.parts]
    return turn.text()


def _part(part: Part) -> dict[str, Any]:
    """A part of a message: an image only says where it is, since its content does not go through the template."""
    return (
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": shown_as(part.kind)}
    )


def _call(call: ToolCall, form: TemplateForm) -> dict[str, Any]:
    """A call with its arguments as the template writes them: an object, or its JSON."""
    arguments: Any = _arguments(call)
    if form.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": _call_id(call.id, form),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _call_id(call_id: str, form: TemplateForm) -> str:
    if not form.ids_short or (len(call_id) == ID_CHARACTERS and call_id.isascii() and call_id.isalnum()):
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:ID_CHARACTERS]


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object: what a model wrote may be cut off, or a value of another type."""
    try:
        arguments = msgspec.json.decode(call.arguments) if call.arguments else {}
    except (msgspec.DecodeError, RecursionError):
        arguments = call.arguments
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {ARGUMENTS: arguments}
