"""Messages of a chat request as turns of a conversation. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from headwater.actors.edge.api.openai.types import ChatMessage, ContentPart, MessageCall
from headwater.actors.edge.generation.messages.media_parts import (
    audio_media,
    data_media,
    file_media,
    url_media,
)
from headwater.actors.edge.generation.messages.turn import (
    MediaPart,
    Part,
    TextPart,
    ToolCall,
    Turn,
    joined_texts,
)
from headwater.actors.http.errors import bad_request


def turns_of(messages: Sequence[ChatMessage], param: str = "messages") -> tuple[Turn, ...]:
    """The conversation in the field `param`. Raises `ApiError` 400 naming the message or part."""
    return tuple([_turn(message, f"{param}[{number}]") for number, message in enumerate(messages)])


def _turn(message: ChatMessage, param: str) -> Turn:
    content = message.content if message.content is not None else message.refusal
    return Turn(
        role=message.role,
        parts=_parts(content, f"{param}.content"),
        name=message.name or "",
        calls=tuple(
            [
                _call(call, f"{param}.tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls or ())
            ]
        ),
        call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _call(call: MessageCall, param: str) -> ToolCall:
    if call.type != "function":
        raise bad_request(
            f"{param}.type is {call.type[:64]!r}; calls are of functions.", param=f"{param}.type"
        )
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _parts(content: str | list[ContentPart] | None, param: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    return joined_texts(_part(part, f"{param}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, param: str) -> Part:
    if part.type in ("text", "refusal"):
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise bad_request(f"{param}.{part.type} is missing.", param=f"{param}.{part.type}")
        return TextPart(text)
    read = _MEDIA.get(part.type)
    if read is None:
        known = ", ".join(["text", *_MEDIA])
        raise bad_request(f"{param}.type is {part.type[:64]!r}; it is one of {known}.", param=f"{param}.type")
    return read(getattr(part, part.type), f"{param}.{part.type}")


def _image(value: Any, param: str) -> MediaPart:
    given = {"url": value} if isinstance(value, str) else _object(value, param)
    detail = given.get("detail") or ""
    if detail not in ("", "auto", "low", "high", "original"):
        raise bad_request(f"{param}.detail is auto, low, high or original.", param=f"{param}.detail")
    return url_media("image", given.get("url"), param, detail=detail)


def _image_embeds(value: Any, param: str) -> MediaPart:
    return data_media("embedding", value, param, media_type="")


def _audio(value: Any, param: str) -> MediaPart:
    return audio_media(_object(value, param), param)


def _audio_url(value: Any, param: str) -> MediaPart:
    return url_media("audio", _object(value, param).get("url"), param)


def _video(value: Any, param: str) -> MediaPart:
    return url_media("video", _object(value, param).get("url"), param)


def _file(value: Any, param: str) -> MediaPart:
    given = _object(value, param)
    return file_media(
        param, name=given.get("filename"), data=given.get("file_data"), file_id=given.get("file_id")
    )


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be an object.", param=param)
    return value


_MEDIA: Final[dict[str, Callable[[Any, str], MediaPart]]] = {
    "image_url": _image,
    "image_embeds": _image_embeds,
    "input_audio": _audio,
    "audio_url": _audio_url,
    "video_url": _video,
    "file": _file,
}
