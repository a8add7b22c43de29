"""Media in prompts: what an engine computes next to tokens, or instead of them. Core NATS, never the log."""

from collections.abc import Iterable
from math import prod
from typing import Final, Literal

import msgspec

from headwater.schemas.media_kind import PromptMediaKind
from headwater.schemas.messages.transfer import DType, Offer

VALUE_BYTES: Final[dict[PromptMediaKind, int]] = {"image": 1, "video": 1, "audio": 4, "recording": 4}
"""Bytes of one value."""

DTYPE_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""The same, of embeddings that clients send."""


MediaTransport = Literal["none", "nixl", "shared"]
"""How decoded media get from an edge to a worker: in pieces through NATS, over NIXL, or in memory that processes of one machine share."""


class ImageEmbedding(msgspec.Struct, frozen=True, array_like=True):
    """What an encode worker computed of an image: `offer` is of its embedding, a tensor of one row per placeholder token or more.

    The worker is the offer's owner, in its incarnation `epoch`. `fields` is JSON: what the model needs of the image besides its
    embedding (Qwen-VL's `image_grid_thw`); empty for a model that needs the image itself.
    """

    offer: Offer
    epoch: int
    fields: bytes = b""


class ClientEmbedding(msgspec.Struct, frozen=True, array_like=True):
    """An embedding that came from the client in place of the image: `width` values of `dtype` for each token. `fields` as in `ImageEmbedding`."""

    dtype: DType
    width: int
    fields: bytes = b""


class PromptMedia(msgspec.Struct, frozen=True, array_like=True):
    """An item of media in a prompt, decoded.

    `id` is 32 hexadecimal digits over what the model sees; equal ids are equal content. Its `tokens` placeholder tokens are in the prompt
    from position `start` on. An image has `shape` (height, width, 3), uint8 RGB; a video (frames, height, width, 3). Audio has `shape` (samples,), float32 mono
    at the rate of the model. A recording is audio without placeholder tokens: it is to be transcribed, and its tokens are all those of the prompt.
    `data` is empty in messages: a worker that does not have the item yet fetches it from the edge. With an `embedding` it need not.
    If an embedding is `given`, that is its data, and `shape` is that of an image which has as many tokens.
    """

    kind: PromptMediaKind
    id: str
    start: int
    tokens: int
    shape: tuple[int, ...]
    data: bytes = b""
    embedding: ImageEmbedding | None = None
    given: ClientEmbedding | None = None

    @property
    def size(self) -> int:
        """Bytes of the data."""
        if self.given is not None:
            return DTYPE_BYTES[self.given.dtype] * self.tokens * self.given.width
        return VALUE_BYTES[self.kind] * prod(self.shape)


def media_features(media: Iterable[PromptMedia]) -> dict[str, tuple[PromptMedia, ...]]:
    """The media of a prompt as the features that capabilities are needed for: see `headwater.schemas.tables.NEEDS`."""
    items = tuple(media)
    fields: dict[str, PromptMediaKind] = {
        "images": "image",
        "videos": "video",
        "audio": "audio",
        "recordings": "recording",
    }
    found = {name: tuple([item for item in items if item.kind == kind]) for name, kind in fields.items()}
    return found | {"given_embeddings": tuple([item for item in items if item.given is not None])}


class MediaQuery(msgspec.Struct, frozen=True, array_like=True):
    """A worker asks the edge for `count` bytes of an item from `offset` on; `as_offer`: for an offer of all its bytes, as uint8."""

    id: str
    offset: int
    count: int
    as_offer: bool = False


class MediaPiece(msgspec.Struct, frozen=True, array_like=True):
    """The bytes asked for, or the offer; `known` is false for an item of no request in flight.

    Without an offer where one was asked for, the edge makes none: it has no transfer, or no room. An earlier release sends bytes.
    """

    known: bool
    data: bytes = b""
    offer: Offer | None = None
