"""Messages of a conversation as requests have them, whichever API they came through."""

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "video", "embedding", "file"]


class TextPart(msgspec.Struct, frozen=True):
    """A piece of text in a message."""

    text: str


class MediaPart(msgspec.Struct, frozen=True):
    """An image, audio, video, the embedding of an image, or a file in a message, validated but not fetched.

    Either `url` (https: or data:), or base64 `data` with its `media_type`, or the `file_id` of an upload. `detail` is
    OpenAI's hint for images, `format` its name of the audio encoding, `name` the name of a file. `param` names the part
    in error messages.
    """

    kind: MediaKind
    param: str
    url: str = ""
    data: str = ""
    media_type: str = ""
    file_id: str = ""
    format: str = ""
    detail: str = ""
    name: str = ""

    def __hash__(self) -> int:
        """By its place, which is its own within a request: the hash of 27 MB of base64 takes the event loop 8 ms."""
        return hash((self.kind, self.param))


Part = TextPart | MediaPart

TEXT_SEPARATOR: Final = "\n"
"""Between neighbouring parts of text: without it the last word of one and the first of the next would be one."""


def joined_texts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts of one message, with neighbouring texts as one."""
    found: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        if texts:
            found.append(TextPart(TEXT_SEPARATOR.join(texts)))
            texts = []
        found.append(part)
    if texts:
        found.append(TextPart(TEXT_SEPARATOR.join(texts)))
    return tuple(found)


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made in an earlier turn. `arguments` is JSON text as the client sent it."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation. `reasoning` is what the model thought before an assistant's content; `call_id` belongs to role tool."""

    role: Role
    parts: tuple[Part, ...] = ()
    name: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""

    def text(self) -> str:
        """All text parts, joined."""
        return "".join([part.text for part in self.parts if isinstance(part, TextPart)])
