"""Images to encode for other workers. Core NATS, never the log."""

import msgspec

from headwater.schemas import hashing
from headwater.schemas.hashing import U64
from headwater.schemas.inference import Refused, WaitingEdge
from headwater.schemas.media import ImageEmbedding, PromptMedia

SALT = "headwater image embeddings"
"""Keeps the blocks of embeddings apart from those of prompts that begin with an image."""


class EncodeRequest(msgspec.Struct, frozen=True, array_like=True):
    """One image of the request at `edge`, which has its pixels.

    With more than `ahead_max` tokens of other images ahead of it, the edge would rather have it encoded elsewhere. `waiter` as in `EmbedRequest`.
    """

    request: str
    edge: str
    item: PromptMedia
    ahead_max: int
    waiter: WaitingEdge | None = None


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """The image's embedding, for one reader. `cached`: it had been computed before."""

    embedding: ImageEmbedding
    cached: bool


class Declined(msgspec.Struct, frozen=True, array_like=True, tag="declined"):
    """There are `ahead` tokens of other images ahead of it: more than the request allows."""

    ahead: int


EncodeReply = Encoded | Declined | Refused


def embedding_hashes(item: PromptMedia, block_size: int) -> U64:
    """The block hashes that stand for an image's embedding in the log: those of a prompt that is this image alone.

    Its tokens are rounded up to full blocks, as a prompt's last partial block has no hash.
    """
    blocks = embedding_blocks(item, block_size)
    tokens = blocks * block_size
    return hashing.sequence_hashes(
        _ZEROS[:tokens] if tokens <= len(_ZEROS) else hashing.unpack_tokens(bytes(4 * tokens)),
        block_size,
        parent=hashing.seed("", SALT),
        multimodal=hashing.media_digests([(item.id, 0, tokens)], block_size),
    )


def embedding_blocks(item: PromptMedia, block_size: int) -> int:
    """Blocks of `block_size` tokens that an image's embedding takes."""
    return -(-item.tokens // block_size)


_ZEROS = hashing.unpack_tokens(bytes(4 * 16_384))
