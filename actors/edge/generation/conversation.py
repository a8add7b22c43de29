"""A conversation as chat templates expect it: plain JSON types, with Hugging Face's names. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.actors.edge.generation.messages.load import shown_as
from headwater.actors.edge.generation.messages.turn import MediaPart, Part, TextPart, ToolCall, Turn
from headwater.actors.edge.generation.request import GenerationRequest


def template_messages(turns: Sequence[Turn], *, developer: bool = True) -> list[dict[str, Any]]:
    """The messages. `developer`: the template knows that role; otherwise it becomes `system`."""
    called = {call.id: call.name for turn in turns for call in turn.calls if call.id}
    messages = []
    for turn in turns:
        message = _message(turn)
        if turn.role == "tool" and turn.call_id in called:
            # Some templates identify a result by the function's name only.
            message.setdefault("name", called[turn.call_id])
        if turn.role == "developer" and not developer:
            message["role"] = "system"
        messages.append(message)
    return messages


def template_variables(request: GenerationRequest) -> dict[str, Any]:
    """Variables for the template; those that the client names itself win.

    Templates call the switch for reasoning either `enable_thinking` or `thinking`. What a template does not use has no
    effect.
    """
    reasoning = request.reasoning
    enabled = reasoning.enabled
    variables: dict[str, Any] = {}
    if reasoning.effort is not None:
        variables["reasoning_effort"] = reasoning.effort
        if enabled is None and reasoning.effort == "none":
            enabled = False
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled}
    if reasoning.budget is not None:
        variables["thinking_budget"] = reasoning.budget
    return variables | request.prompt_options.variables


def _message(turn: Turn) -> dict[str, Any]:
    content: Any = turn.text() if turn.parts or not turn.calls else None
    if any(isinstance(part, MediaPart) for part in turn.parts):
        content = [_part(part) for part in turn.parts]
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.name:
        message["name"] = turn.name
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    if turn.calls:
        message["tool_calls"] = [_call(call) for call in turn.calls]
    if turn.reasoning:
        # Each name is used by some templates; those that leave earlier reasoning out use none of them.
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), turn.reasoning)
    return message


def _part(part: Part) -> dict[str, Any]:
    """A part of a message: an image only says where it is, since its content does not go through the template."""
    return (
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": shown_as(part.kind)}
    )


def _call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write in the model's own format."""
    try:
        arguments = msgspec.json.decode(call.arguments) if call.arguments else {}
    except (msgspec.DecodeError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
