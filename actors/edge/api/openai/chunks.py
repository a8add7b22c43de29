"""The chunks of a stream, as bytes: a prepared prefix, what changes as JSON, and a suffix."""

from typing import Any, Final, Literal

import msgspec

Endpoint = Literal["chat", "completions"]

DONE: Final = b"data: [DONE]\n\n"

_json = msgspec.json.encode


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _json(document) + b"\n\n"


class ChunkHead:
    """What all chunks of a response begin and end with. `usage`: they have a usage, null in all but the last."""

    def __init__(self, endpoint: Endpoint, name: str, created_s: int, model: str, *, usage: bool) -> None:
        kind = "chat.completion.chunk" if endpoint == "chat" else "text_completion"
        head = {"id": name, "object": kind, "created": created_s, "model": model}
        self.bytes = b"data: " + _json(head)[:-1] + b',"choices":['
        self.end = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def usage(self, counts: Any) -> bytes:
        """The chunk with the usage, which has no choices."""
        return self.bytes + b'],"usage":' + _json(counts) + b"}\n\n"

    def set_usage(self, counts: Any) -> None:
        """The usage of the chunks that follow."""
        self.end = b'],"usage":' + _json(counts) + b"}\n\n"


class ChunkWriter:
    """The chunks of one choice. Everything but the text of plain chunks is encoded once."""

    __slots__ = ("_head", "_plain_end", "_shared", "_text")

    def __init__(self, endpoint: Endpoint, head: ChunkHead, index: int) -> None:
        chat = endpoint == "chat"
        self._shared = head
        self._head = head.bytes + b'{"index":%d,' % index
        self._text = self._head + (b'"delta":{"content":' if chat else b'"text":')
        self._plain_end = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}' + head.end

    def text(self, text: str) -> bytes:
        """A chunk with nothing but new text."""
        return self._text + _json(text) + self._plain_end

    def choice(self, **fields: Any) -> bytes:
        """A chunk with these fields of the choice."""
        document = {
            **fields,
            "logprobs": fields.get("logprobs"),
            "finish_reason": fields.get("finish_reason"),
        }
        return self._head + _json(document)[1:] + self._shared.end
