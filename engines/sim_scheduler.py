"""The simulated engine's scheduler: which sequences run, what each computes in a step, and whose blocks must go."""

from collections import deque

from headwater.engines.paged_cache import PagedCache
from headwater.engines.sim_sequence import SimSequence, SimSettings
from headwater.schemas import hashing


class SimScheduler:
    """Continuous batching over one paged cache."""

    def __init__(self, settings: SimSettings, cache: PagedCache) -> None:
        self.waiting: deque[SimSequence] = deque()
        self.running: list[SimSequence] = []
        self._settings = settings
        self._cache = cache

    def remove(self, sequence: SimSequence) -> None:
        """A sequence ended, wherever it was."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, *, admits: bool) -> tuple[list[tuple[SimSequence, int]], int]:
        """Choose this step's work: (sequence, tokens to compute) and the prompt tokens among them.

        Sequences in decode go first, each one token; what is left of the step goes to prompts, the oldest
        first. Where blocks run out the newest sequence gives its own up and starts again later. Without `admits`
        nothing new begins.
        """
        budget = self._settings.step_tokens_max
        chunks: list[tuple[SimSequence, int]] = []
        prompt_tokens = 0
        for sequence in sorted(self.running, key=lambda s: s.computed < s.target):
            if sequence.waiting:
                continue
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count > 0 and self._reserve(sequence, count):
                chunks.append((sequence, count))
                budget -= count
                prompt_tokens += count if sequence.computed < sequence.target else 0
        while admits and self.waiting and budget > 0 and len(self.running) < self._settings.sequences_max:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._reserve(sequence, count, preempt=False):
                self._give_up(sequence)
                self.waiting.appendleft(sequence)
                break
            self.running.append(sequence)
            chunks.append((sequence, count))
            budget -= count
            prompt_tokens += count
        return [(s, n) for s, n in chunks if not s.waiting], prompt_tokens

    def _admit(self, sequence: SimSequence) -> bool:
        """Take a sequence's cached prefix, if the rest of its prompt fits."""
        size = self._settings.block_size
        usable = (len(sequence.tokens) - 1) // size
        if not sequence.hashes:
            root = hashing.seed(sequence.request.lora_name, sequence.request.cache_salt)
            packed = hashing.unpack_tokens(hashing.pack_tokens(sequence.tokens))
            sequence.hashes = hashing.sequence_hashes(packed, size, parent=root).tolist()
        hit = self._cache.match(sequence.hashes[:usable])
        need = -(-len(sequence.tokens) // size) - hit
        if need > self._cache.available - hit and self.running:
            return False
        sequence.blocks = sequence.hashes[:hit]
        self._cache.take(sequence.blocks)
        sequence.computed = hit * size
        sequence.target = len(sequence.tokens)
        if sequence.arrived:
            # All but the last token, which every engine computes itself. A preemption loses it like any other.
            sequence.computed, sequence.arrived = max(sequence.computed, sequence.arrived - 1), 0
        if sequence.cached < 0:
            sequence.cached = sequence.computed
        sequence.waiting = False
        return True

    def _reserve(self, sequence: SimSequence, count: int, *, preempt: bool = True) -> bool:
        """Make sure that blocks exist for `count` more tokens, preempting the newest where they do not."""
        size = self._settings.block_size
        need = -(-(sequence.computed + count) // size) - len(sequence.blocks) - sequence.private
        while need > 0 and not self._cache.allocate(need):
            victim = next((s for s in reversed(self.running) if not s.waiting), None)
            if not preempt or victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.private += max(0, need)
        return True

    def _preempt(self, sequence: SimSequence) -> None:
        self.running.remove(sequence)
        self._give_up(sequence)
        self.waiting.appendleft(sequence)

    def _give_up(self, sequence: SimSequence) -> None:
        self._cache.release(sequence.blocks, sequence.private)
        sequence.blocks, sequence.private, sequence.computed = [], 0, 0
        sequence.waiting = True

    def commit(self, sequence: SimSequence) -> None:
        """Cache the blocks that are now full."""
        size = self._settings.block_size
        full = sequence.computed // size
        done = len(sequence.blocks)
        if full <= done:
            return
        while len(sequence.hashes) < full:
            at = len(sequence.hashes) * size
            root = hashing.seed(sequence.request.lora_name, sequence.request.cache_salt)
            parent = sequence.hashes[-1] if sequence.hashes else root
            sequence.hashes += hashing.chain_plain(sequence.tokens[at : at + size], size, parent)
        root = hashing.seed(sequence.request.lora_name, sequence.request.cache_salt)
        parent = sequence.hashes[done - 1] if done else root
        fresh = sequence.hashes[done:full]
        self._cache.commit(parent, fresh)
        sequence.blocks += fresh
        sequence.private -= len(fresh)
