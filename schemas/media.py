"""Media in prompts: their kinds, what an engine computes from them, and offers of tensors from one actor to another.

The messages travel over core NATS and are never in the log. The bytes of a tensor are not in them: `Offer.place` says where they are,
and the transfer reads them from there. Only the owner of an offer grants its reading, and grants it once.
"""

from collections.abc import Iterable
from math import prod
from typing import Annotated, Final, Literal

import msgspec

PromptMediaKind = Literal["image", "video", "audio", "recording"]

SAMPLED_FRAMES: Final = 32
"""The number of frames that a video is sampled to where an engine's settings state none: vLLM's own default, for all engines."""

ONE: Final[dict[PromptMediaKind, str]] = {
    "image": "an image",
    "video": "a video",
    "audio": "an audio clip",
    "recording": "a recording",
}
SEVERAL: Final[dict[PromptMediaKind, str]] = {
    "image": "images",
    "video": "videos",
    "audio": "audio clips",
    "recording": "recordings",
}
"""Their plurals, for messages for people."""


LEASE_BYTES = 16
DIGEST_BYTES = 16

LeaseId = Annotated[bytes, msgspec.Meta(min_length=LEASE_BYTES, max_length=LEASE_BYTES)]
"""128 random bits: only a reader that received the offer can claim it."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0)]

DType = Literal[
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
"""Types of elements, by the names that numpy and torch share (numpy has no bfloat16)."""

MemoryKind = Literal["DRAM", "VRAM"]
Refusal = Literal["unknown", "expired", "consumed", "stale_epoch", "closing"]
Outcome = Literal["read", "checksum_mismatch", "unused", "timed_out", "failed"]


class NixlPlace(msgspec.Struct, frozen=True, array_like=True, tag="nixl"):
    """Bytes in memory that a NIXL agent registered.

    `agent` names one incarnation of one process and is never reused; `metadata` is the digest of what a reader needs
    to connect to it. `address` is in that process, `device` the GPU's index (0 for DRAM).
    """

    agent: str
    metadata: Digest
    memory: MemoryKind
    device: Count
    address: Count


class LocalPlace(msgspec.Struct, frozen=True, array_like=True, tag="local"):
    """Bytes in memory of the same process: `offset` in the slab that `agent` registered."""

    agent: str
    offset: Count


class SharedPlace(msgspec.Struct, frozen=True, array_like=True, tag="shared"):
    """Bytes in memory that processes of one machine share: `offset` in the slab behind descriptor `fd` of process `pid`.

    `agent` is the name of that memory, and never reused.
    """

    agent: str
    pid: Count
    fd: Count
    offset: Count


Place = NixlPlace | LocalPlace | SharedPlace


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """A tensor that one reader may fetch. `checksum` is XXH3-64 of its `nbytes` bytes, in C order.

    `expires_ns` is the owner's wall clock, for information: only the owner decides whether an offer has expired. A
    lease of an earlier epoch of the owner is void.
    """

    lease: LeaseId
    owner: str
    epoch: int
    dtype: DType
    shape: tuple[Count, ...]
    nbytes: Count
    checksum: Count
    expires_ns: int
    place: Place


class OfferClaim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """A reader claims its one reading. `needs_metadata`: it has not connected to the owner's agent before."""

    lease: LeaseId
    epoch: int
    consumer: str
    attempt: int
    needs_metadata: bool = False


class ClaimGranted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """The bytes stay unchanged for `read_within_ms` from now. `metadata` is empty unless the claim needs it."""

    lease: LeaseId
    read_within_ms: Count
    metadata: bytes = b""


class ClaimRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The lease cannot be read, and a repeated claim will not succeed: a new offer may."""

    lease: LeaseId
    reason: Refusal


ClaimReply = ClaimGranted | ClaimRefused


class OfferReleased(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """The reader is done. After `timed_out` and `failed` its reading may still be in progress."""

    lease: LeaseId
    epoch: int
    consumer: str
    attempt: int
    outcome: Outcome


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
    by_name = {name: tuple([item for item in items if item.kind == kind]) for name, kind in fields.items()}
    return by_name | {"given_embeddings": tuple([item for item in items if item.given is not None])}


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
