"""The simulated engine's scheduler: which sequences run, what each computes in a step, which are preempted, and their metrics.

It has no clock. Its driver plans a step, waits for the step's duration, and then reports what each sequence computed: the
engine on asyncio does so token by token, a what-if replay combines steps in which nothing changes.

The engine derives a subclass with tokens; in a what-if replay only the hashes of prompts are known.

The simulated engine has metrics of its own, as other engines have: they are made when the first engine of a process is.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Final, Generic, NamedTuple, TypeVar
from zlib import crc32

import msgspec
from prometheus_client import Counter, Histogram

from headwater.engines.engine import Emit
from headwater.engines.sim import (
    BLOCK_SIZE,
    EMBEDDING_TOKENS,
    SEQUENCES_MAX,
    STEP_TOKENS_MAX,
    TOTAL_BLOCKS,
    StepTime,
)
from headwater.engines.sim.cache import ImageStore, PagedCache
from headwater.schemas import hashing
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.media import PromptMediaKind
from headwater.schemas.tables import MediaSupport

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class SimMetrics:
    """The metrics of all simulated engines of a process."""

    def __init__(self) -> None:
        self.prompt_tokens = Counter("sim_prompt_tokens", "Prompt tokens of requests that began")
        self.cached_tokens = Counter("sim_cached_tokens", "Those of them that were cached")
        self.generated_tokens = Counter("sim_generated_tokens", "Tokens generated")
        self.preemptions = Counter("sim_preemptions", "Sequences preempted")
        self.queue_seconds = Histogram("sim_queue_seconds", "Arrival to first step", buckets=BUCKETS)
        self.first_token_seconds = Histogram(
            "sim_first_token_seconds", "Arrival to first token", buckets=BUCKETS
        )
        self.token_seconds = Histogram(
            "sim_token_seconds", "First token to end, by the tokens after the first", buckets=BUCKETS
        )
        self.request_seconds = Histogram("sim_request_seconds", "Arrival to end", buckets=BUCKETS)


@cache
def sim_metrics() -> SimMetrics:
    """The metrics of this process, which may be registered once."""
    return SimMetrics()


class SequenceTimes(msgspec.Struct):
    """Times of one sequence by the engine's clock; 0: not yet."""

    arrived_s: float
    began_s: float = 0.0
    first_token_s: float = 0.0

    def begin(self, now_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """It runs for the first time, with so many tokens of its prompt cached. A call after that does nothing."""
        if self.began_s:
            return
        metrics, self.began_s = sim_metrics(), now_s
        metrics.queue_seconds.observe(now_s - self.arrived_s)
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.cached_tokens.inc(cached_tokens)

    def generate(self, now_s: float, tokens: int) -> None:
        """It generated tokens."""
        sim_metrics().generated_tokens.inc(tokens)
        if not self.first_token_s:
            self.first_token_s = now_s
            sim_metrics().first_token_seconds.observe(now_s - self.arrived_s)

    def end(self, now_s: float, produced: int) -> None:
        """It ended well after so many tokens."""
        sim_metrics().request_seconds.observe(now_s - self.arrived_s)
        if produced > 1:
            sim_metrics().token_seconds.observe((now_s - self.first_token_s) / (produced - 1))


class MediaSpan(NamedTuple):
    """An item of media in a prompt: `tokens` tokens from `start` on. Equal ids are equal content."""

    id: str
    start: int
    tokens: int
    kind: PromptMediaKind = "image"


class Scheduled(msgspec.Struct, eq=False):
    """One sequence with `length` tokens so far: its prompt and the generated tokens.

    `hashes` are those of its first blocks, a chain after `root`, as many as were requested so far. `blocks` are cached
    under their hash, `private` are not (yet). `computed` tokens have KV; up to `target` they count as a prompt, which after
    a preemption includes tokens generated before. `cached` tokens were found when it first started, -1 before that.
    `arrived`: number of tokens whose KV was handed off from another engine. `media` are in order; the first `encoded` of them need no
    embedding any more.
    """

    length: int
    target: int
    root: int = 0
    hashes: list[int] = []
    blocks: list[int] = []
    private: int = 0
    computed: int = 0
    produced: int = 0
    cached: int = -1
    arrived: int = 0
    media: tuple[MediaSpan, ...] = ()
    encoded: int = 0
    waiting: bool = True
    ended: bool = False

    @abstractmethod
    def hash_blocks(self, count: int, size: int) -> None:
        """Extend `hashes` to at least the first `count` blocks of `size` tokens, all of which are full."""


# The scheduler.

SequenceT = TypeVar("SequenceT", bound=Scheduled)


class Limits(NamedTuple):
    """Tokens per block, maximum tokens per step, maximum running sequences."""

    block_size: int = 16
    step_tokens_max: int = STEP_TOKENS_MAX
    sequences_max: int = SEQUENCES_MAX


class StepPlan(NamedTuple, Generic[SequenceT]):
    """One step: (sequence, tokens to compute), the prompt tokens among them, and whether any sequence gets a token.

    `encodes` are the numbers of tokens of the media that it encodes before.
    """

    chunks: list[tuple[SequenceT, int]]
    prompt_tokens: int
    emits: bool
    encodes: tuple[int, ...] = ()


class SimScheduler(Generic[SequenceT]):
    """Continuous batching over one paged cache. `preemptions` counts preempted sequences.

    `images` are the embeddings at hand: an item of media is encoded in the step that computes its first token, unless its embedding is there.
    """

    def __init__(self, limits: Limits, cache: PagedCache, images: ImageStore | None = None) -> None:
        self.waiting: deque[SequenceT] = deque()
        self.running: list[SequenceT] = []
        self.preemptions = 0
        self._limits = limits
        self._size = limits.block_size
        self._cache = cache
        self._images = images

    def remove(self, sequence: SequenceT) -> None:
        """Remove a sequence, running or waiting."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def release(self, sequence: SequenceT) -> None:
        """Release a sequence's blocks: full ones stay cached until their space is needed."""
        self._cache.release(sequence.blocks, sequence.private)
        sequence.blocks, sequence.private = [], 0

    def plan(self, *, admits: bool = True) -> StepPlan[SequenceT]:
        """Plan the next step and allocate its blocks.

        Decoding sequences come first, with one token each; the rest of the step is for prompts, oldest first.
        Where blocks run out the newest sequence is preempted. Without `admits` no waiting sequence starts.

        The blocks that a prompt's chunk fills are cached here, so a sequence that starts in the same step shares them, as in vLLM
        (`KVCacheManager.allocate_slots`): within a step each layer writes the keys and values of all sequences before it reads any.
        """
        budget = self._limits.step_tokens_max
        chunks: list[tuple[SequenceT, int]] = []
        prompt_tokens = 0
        preempted = self.preemptions
        for sequence in sorted(self.running, key=_is_prompt):
            if sequence.waiting:
                continue
            count = min(sequence.length - sequence.computed, budget)
            if count > 0 and self._reserve(sequence, count):
                chunks.append((sequence, count))
                budget -= count
        if self.preemptions > preempted:
            chunks = [(s, n) for s, n in chunks if not s.waiting]
        for sequence, count in chunks:
            if sequence.computed < sequence.target:
                prompt_tokens += count
                self._cache_full_blocks(sequence, sequence.computed + count)
        while admits and self.waiting and budget > 0 and len(self.running) < self._limits.sequences_max:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            count = min(sequence.length - sequence.computed, budget)
            if not self._reserve(sequence, count, preempt=False):
                self._release_blocks(sequence)
                self.waiting.appendleft(sequence)
                break
            self._cache_full_blocks(sequence, sequence.computed + count)
            self.running.append(sequence)
            chunks.append((sequence, count))
            budget -= count
            prompt_tokens += count
        emits = any(s.computed + n >= s.length for s, n in chunks)
        return StepPlan(chunks, prompt_tokens, emits, self._encodes(chunks))

    def _encodes(self, chunks: list[tuple[SequenceT, int]]) -> tuple[int, ...]:
        """Tokens of the media whose embeddings these chunks need and that are not at hand."""
        token_counts: list[int] = []
        for sequence, count in chunks:
            end = sequence.computed + count
            while sequence.encoded < len(sequence.media):
                item = sequence.media[sequence.encoded]
                if item.start >= end:
                    break
                sequence.encoded += 1
                # With cached KV up to its last token an item is not looked at.
                if item.start + item.tokens > sequence.computed and not self._at_hand(item):
                    token_counts.append(item.tokens)
        return tuple(token_counts)

    def _at_hand(self, item: MediaSpan) -> bool:
        if self._images is None:
            return False
        if self._images.use(item.id):
            return True
        self._images.keep(item.id, item.tokens)
        return False

    def alike(self, plan: StepPlan[SequenceT]) -> int:
        """Number of consecutive equal steps, including this one, if no sequence ends or arrives.

        While all running sequences decode, a step differs from the previous one only once a sequence needs another
        block: until then the same blocks are in use, and no waiting sequence can be admitted.
        """
        if plan.prompt_tokens or not plan.chunks:
            return 1
        size = self._size
        return min([size - sequence.computed % size for sequence, _ in plan.chunks])

    def compute(self, sequence: SequenceT, count: int) -> bool:
        """Count `count` more computed tokens of a sequence, and cache full blocks. True: it generates a token."""
        sequence.computed += count
        self._cache_full_blocks(sequence, sequence.computed)
        return sequence.computed >= sequence.length

    def _cache_full_blocks(self, sequence: SequenceT, computed: int) -> None:
        """Cache the blocks that are full with `computed` tokens."""
        done = len(sequence.blocks)
        full = computed // self._size
        if full > done:
            sequence.hash_blocks(full, self._size)
            fresh = sequence.hashes[done:full]
            self._cache.commit(sequence.hashes[done - 1] if done else sequence.root, fresh)
            sequence.blocks += fresh
            sequence.private -= len(fresh)

    def _admit(self, sequence: SequenceT) -> bool:
        """Start a sequence with its cached prefix, if the rest of its prompt fits."""
        size = self._size
        usable = (sequence.length - 1) // size
        if not sequence.hashes:
            sequence.hash_blocks(sequence.length // size, size)
        hit = self._cache.match(sequence.hashes[:usable])
        need = -(-sequence.length // size) - hit
        if need > self._cache.available - hit and self.running:
            return False
        sequence.blocks = sequence.hashes[:hit]
        self._cache.take(sequence.blocks)
        sequence.computed = hit * size
        sequence.target = sequence.length
        if sequence.arrived:
            # All but the last token, which every engine computes itself. A preemption drops it like any other KV.
            sequence.computed, sequence.arrived = max(sequence.computed, sequence.arrived - 1), 0
        if sequence.cached < 0:
            sequence.cached = sequence.computed
        sequence.waiting = False
        return True

    def _reserve(self, sequence: SequenceT, count: int, *, preempt: bool = True) -> bool:
        """Allocate blocks for `count` more tokens, preempting the newest sequence where there are too few."""
        need = -(-(sequence.computed + count) // self._size) - len(sequence.blocks) - sequence.private
        while need > 0 and not self._cache.allocate(need):
            victim = next((s for s in reversed(self.running) if not s.waiting), None)
            if not preempt or victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.private += max(0, need)
        return True

    def _preempt(self, sequence: SequenceT) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release_blocks(sequence)
        self.waiting.appendleft(sequence)

    def _release_blocks(self, sequence: SequenceT) -> None:
        self.release(sequence)
        sequence.computed = sequence.encoded = 0
        sequence.waiting = True


def _is_prompt(sequence: Scheduled) -> bool:
    return sequence.computed < sequence.target


# One request, the engine's settings, and the generated tokens.


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
    times: SequenceTimes
    digests: tuple[hashing.MultimodalDigest, ...] = ()

    @classmethod
    def create(
        cls,
        request: GenerateRequest,
        emit: Emit,
        tokens: list[int],
        seed: int,
        answer: int,
        block_size: int,
        now_s: float,
    ) -> "SimSequence":
        """The sequence of a request that is submitted now."""
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
            times=SequenceTimes(now_s),
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
    """Return by how much images, each a number of 32 bits, shift an answer; 0 without any."""
    return crc32(b"".join([image.to_bytes(4, "little") for image in images])) if images else 0


def token_at(script: Sequence[int], seed: int, number: int) -> int:
    """Token `number` of an answer: a function of only seed and position."""
    return script[(seed + number) % len(script)]
