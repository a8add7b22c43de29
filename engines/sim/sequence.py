"""One request in the simulated engine's scheduler, the engine's settings, and the generated tokens."""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from headwater.engines.engine import Emit
from headwater.engines.sim.defaults import (
    BLOCK_SIZE,
    EMBEDDING_TOKENS,
    SEQUENCES_MAX,
    STEP_TOKENS_MAX,
    TOTAL_BLOCKS,
)
from headwater.engines.sim.scheduled import MediaSpan, Scheduled
from headwater.engines.sim.scheduler import Limits
from headwater.engines.sim.step_time import StepTime
from headwater.schemas import hashing
from headwater.schemas.messages.inference import GenerateRequest
from headwater.schemas.tables.card import MediaSupport


class SimSettings(NamedTuple):
    """Settings of a simulated engine. Defaults follow the public replay that the step times come from."""

    model: str = "sim"
    block_size: int = BLOCK_SIZE
    total_blocks: int = TOTAL_BLOCKS
    context_length: int = 131_072
    step_tokens_max: int = STEP_TOKENS_MAX
    sequences_max: int = SEQUENCES_MAX
    step_time: StepTime = StepTime()
    script: tuple[int, ...] = (0,)
    """Token ids that an answer repeats, from an offset that depends on its seed."""
    eos_token_id: int = -1
    answer_tokens: tuple[int, int] = (24, 96)
    """Shortest and longest answer that ends with EOS."""
    lora_slots: int = 4
    lora_rank_max: int = 64
    split_only: bool = False
    """Serves only the legs of split requests, as SGLang's engines for prefill and decode do."""
    media: MediaSupport = MediaSupport()
    """What its prompts may have next to text."""
    reads_embeddings: bool = False
    """Takes the embeddings of encode workers."""
    accepts_embeddings: bool = False
    """Takes those of clients too."""
    embedding_tokens: int = EMBEDDING_TOKENS
    """Tokens of images whose embeddings are kept."""

    @property
    def limits(self) -> Limits:
        """The limits for the scheduler."""
        return Limits(self.block_size, self.step_tokens_max, self.sequences_max)


class SimSequence(Scheduled, kw_only=True, eq=False):
    """One request in the engine: the scheduler's view of it, and its tokens.

    `spoiled`: the KV handed off to it was another prompt's; `cached_before` of its tokens were cached where it was
    computed (-1: not stated); `first` tokens are passed to the decode leg's engine. `digests` are of the media, by block.
    """

    request: GenerateRequest
    emit: Emit
    tokens: list[int]
    seed: int
    answer: int
    spoiled: bool = False
    cached_before: int = -1
    first: tuple[int, ...] = ()
    digests: tuple[hashing.MultimodalDigest, ...] = ()

    @classmethod
    def create(
        cls, request: GenerateRequest, emit: Emit, tokens: list[int], seed: int, answer: int, block_size: int
    ) -> "SimSequence":
        """The sequence of a newly submitted request."""
        media = tuple([MediaSpan(item.id, item.start, item.tokens, item.kind) for item in request.media])
        places = [(item.id, item.start, item.tokens) for item in media]
        return cls(
            length=len(tokens),
            target=len(tokens),
            root=hashing.seed(request.lora_name, request.cache_salt),
            request=request,
            emit=emit,
            tokens=tokens,
            seed=seed,
            answer=answer,
            media=media,
            digests=tuple(hashing.media_digests(places, block_size)),
        )

    def append(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        self.tokens += tokens
        self.length = len(self.tokens)
        self.produced += len(tokens)

    def hash_blocks(self, count: int, size: int) -> None:
        """See `Scheduled.hash_blocks`."""
        if not self.hashes:
            packed = hashing.unpack_tokens(hashing.pack_tokens(self.tokens))
            self.hashes = hashing.sequence_hashes(
                packed, size, parent=self.root, multimodal=self.digests
            ).tolist()
        while len(self.hashes) < count:
            at = len(self.hashes) * size
            parent = self.hashes[-1] if self.hashes else self.root
            # The prompt's last block may have the end of an item.
            extra = (
                sum(digest for block, digest in self.digests if block == len(self.hashes)) & hashing.U64_MAX
            )
            self.hashes += hashing.chain_plain(self.tokens[at : at + size], size, parent, (extra,))


def seed_of(request: GenerateRequest, images: Sequence[int] = ()) -> int:
    """The seed of an answer: the same on every worker, and independent of the tokens generated so far.

    Without a seed in the request it is derived from the prompt at temperature 0, otherwise from the request's id. `images` are numbers
    for what the prompt's images show, in order; the seed depends on each.
    """
    sampling = request.sampling
    if sampling.seed is not None:
        seed = sampling.seed
    elif not sampling.temperature:
        seed = crc32(request.tokens[: len(request.tokens) - 4 * request.emitted])
    else:
        seed = crc32(request.request.rpartition("-")[0].encode())
    return seed + image_offset(images)


def image_offset(images: Sequence[int]) -> int:
    """By how much images, each a number of 32 bits, shift an answer; 0 without any."""
    return crc32(b"".join([image.to_bytes(4, "little") for image in images])) if images else 0


def token_at(script: Sequence[int], seed: int, number: int) -> int:
    """Token `number` of an answer: a function of only seed and position."""
    return script[(seed + number) % len(script)]
