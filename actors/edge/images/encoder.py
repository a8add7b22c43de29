"""OpenAI's JSON of generated and changed images: the response, and the events of a stream. Pure."""

import base64
from typing import Any, NamedTuple

import msgspec

from headwater.actors.edge.files.generation import FileUpdate
from headwater.schemas.messages.file_generation import FINAL, ImageRequest


class ImagesEncoder(NamedTuple):
    """Of one request. `tokens` are those of its prompt; `created_s` is in seconds of Unix time."""

    order: ImageRequest
    created_s: int
    tokens: int

    def response(self, images: list[dict[str, str]]) -> bytes:
        """The whole response; each of `images` has its b64_json or its url."""
        return msgspec.json.encode(
            {
                "created": self.created_s,
                "background": "opaque",
                "data": images,
                "output_format": self.order.format,
                "size": self._size,
                "usage": self._usage,
                "seed": self.order.seed,
            }
        )

    @property
    def _kind(self) -> str:
        """What the events are called by."""
        return "image_edit" if self.order.images else "image_generation"

    def event(self, update: FileUpdate) -> bytes:
        """The server-sent event of a step or a file."""
        if not update.data:
            return _event(
                {
                    "type": f"{self._kind}.progress",
                    "step": update.steps_done,
                    "steps": self.order.steps,
                }
            )
        common = {
            "b64_json": base64.b64encode(update.data).decode(),
            "background": "opaque",
            "created_at": self.created_s,
            "output_format": self.order.format,
            "quality": "auto",
            "size": self._size,
        }
        if update.preview != FINAL:
            return _event(
                {
                    "type": f"{self._kind}.partial_image",
                    "partial_image_index": update.preview,
                    **common,
                }
            )
        return _event(
            {"type": f"{self._kind}.completed", "usage": self._usage, "seed": self.order.seed, **common}
        )

    @property
    def _size(self) -> str:
        return f"{self.order.width}x{self.order.height}"

    @property
    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.tokens,
            "input_tokens_details": {"text_tokens": self.tokens, "image_tokens": 0},
            "output_tokens": 0,
            "total_tokens": self.tokens,
        }


def error_event(document: dict[str, Any]) -> bytes:
    """A stream that has begun ends with this."""
    return _event({"type": "error", **document})


def _event(document: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), msgspec.json.encode(document))
