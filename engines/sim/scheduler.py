"""The simulated engine's scheduler: which sequences run, what each computes in a step, and which are preempted.

It has no clock. Its driver plans a step, waits for the step's duration, and then reports what each sequence computed: the
engine on asyncio does so token by token, a what-if replay combines steps in which nothing changes.
"""

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from headwater.engines.sim.defaults import SEQUENCES_MAX, STEP_TOKENS_MAX
from headwater.engines.sim.image_store import ImageStore
from headwater.engines.sim.paged_cache import PagedCache
from headwater.engines.sim.scheduled import MediaSpan, Scheduled

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
        found: list[int] = []
        for sequence, count in chunks:
            end = sequence.computed + count
            while sequence.encoded < len(sequence.media):
                item = sequence.media[sequence.encoded]
                if item.start >= end:
                    break
                sequence.encoded += 1
                # With cached KV up to its last token an item is not looked at.
                if item.start + item.tokens > sequence.computed and not self._at_hand(item):
                    found.append(item.tokens)
        return tuple(found)

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
