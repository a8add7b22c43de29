"""Messages of a chat request as turns of a conversation."""

from collections.abc import Sequence

from headwater.actors.edge.api.openai.types import ChatMessage, ContentPart
from headwater.actors.edge.generation.request import Part, TextPart, ToolCall, Turn
from headwater.actors.http.errors import bad_request


def turns_of(messages: Sequence[ChatMessage]) -> tuple[Turn, ...]:
    """The conversation. Raises `ApiError` 400 naming the message or part."""
    return tuple(_turn(message, f"messages[{number}]") for number, message in enumerate(messages))


def _turn(message: ChatMessage, param: str) -> Turn:
    return Turn(
        role=message.role,
        parts=_parts(message.content, f"{param}.content"),
        name=message.name or "",
        calls=tuple(_call(call) for call in message.tool_calls or ()),
        call_id=message.tool_call_id or "",
    )


def _parts(content: str | list[ContentPart] | None, param: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(_part(part, f"{param}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, param: str) -> Part:
    if part.type != "text" or part.text is None:
        raise bad_request(f"Content of type {part.type!r} is not supported by this model.", param=param)
    return TextPart(part.text)


def _call(call: dict[str, object]) -> ToolCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return ToolCall(
        str(call.get("id", "")), str(function.get("name", "")), str(function.get("arguments", ""))
    )
