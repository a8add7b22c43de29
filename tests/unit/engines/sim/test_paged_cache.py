"""The simulated engine's cache: capacity, sharing, eviction, and events that rebuild what it holds."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.engines.engine import KvEvent
from headwater.engines.sim.cache import PagedCache
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.hashing import chain_plain, unpack_hashes

PROMPTS = [
    chain_plain(tokens, 1, 0)
    for tokens in ([1] * 8, [1, 1, 1, 2, 2, 2], [1, 1, 3, 3], [4, 4, 4, 4, 4, 4], [4, 5], [6])
]
PARENTS = {block: parent for names in PROMPTS for parent, block in zip([0, *names], names, strict=False)}


def held_by(events: list[KvEvent], held: Counter[int] | None = None) -> Counter[int]:
    """What a reader of these events believes to be cached. Checks that parents are told right."""
    held = Counter() if held is None else held
    for event in events:
        match event:
            case BlocksStored():
                parent = event.parent
                for block in unpack_hashes(event.hashes).tolist():
                    assert PARENTS[block] == parent
                    assert parent == 0 or held[parent], "a child was announced before its parent"
                    held[block] += 1
                    parent = block
            case BlocksRemoved():
                for block in unpack_hashes(event.hashes).tolist():
                    held[block] -= 1
                    assert held[block] == 0
            case BlocksCleared():
                held.clear()
    return +held


class Sequence:
    """A request as the scheduler drives it: cached blocks at its start, private ones behind them."""

    def __init__(self, names: list[int], hit: int) -> None:
        self.names = names
        self.blocks = names[:hit]
        self.private = 0


class CacheAgainstModel(RuleBasedStateMachine):
    """Sequences come, allocate, fill blocks and end, in any order, on a cache that is too small for all."""

    @initialize(capacity=st.integers(1, 14))
    def begin(self, capacity: int) -> None:
        """An empty cache."""
        self.cache = PagedCache(capacity)
        self.sequences: list[Sequence] = []
        self.told: Counter[int] = Counter()

    @rule(names=st.sampled_from(PROMPTS), most=st.integers(0, 8))
    def admit(self, names: list[int], most: int) -> None:
        """A sequence takes the part of its prompt that is cached."""
        hit = self.cache.match(names[:most])
        before = held_by(self.cache.held())
        assert all(block in before for block in names[:hit])
        assert hit == len(names[:most]) or names[hit] not in before
        self.cache.take(names[:hit])
        self.sequences.append(Sequence(names, hit))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(0, 6))
    def allocate(self, data: st.DataObject, count: int) -> None:
        """A sequence asks for room: it gets all of it, or nothing changes."""
        sequence = data.draw(st.sampled_from(self.sequences))
        available, used = self.cache.available, self.cache.used
        given = self.cache.allocate(count)
        assert given == (count <= available)
        assert self.cache.used == used + (count if given else 0)
        sequence.private += count if given else 0

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(0, 6))
    def commit(self, data: st.DataObject, count: int) -> None:
        """Private blocks of a sequence are full."""
        sequence = data.draw(st.sampled_from(self.sequences))
        done = len(sequence.blocks)
        fresh = sequence.names[done : done + min(count, sequence.private)]
        self.cache.commit(sequence.blocks[-1] if done else 0, fresh)
        sequence.blocks = [*sequence.blocks, *fresh]
        sequence.private -= len(fresh)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A sequence ends."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.cache.release(sequence.blocks, sequence.private)

    @rule()
    def clear(self) -> None:
        """Everything that nobody uses is dropped."""
        self.cache.clear()
        in_use = {block for sequence in self.sequences for block in sequence.blocks}
        assert set(held_by(self.cache.held())) == in_use

    @invariant()
    def room_is_never_exceeded(self) -> None:
        """Private and cached blocks together fit; what is in use is what sequences hold, each block once."""
        cached = held_by(self.cache.held())
        private = sum(sequence.private for sequence in self.sequences)
        in_use = {block for sequence in self.sequences for block in sequence.blocks}
        assert self.cache.private == private
        assert private + len(cached) <= self.cache.capacity
        assert self.cache.used == private + len(in_use)
        assert self.cache.available == self.cache.capacity - self.cache.used
        assert in_use <= set(cached)

    @invariant()
    def events_tell_what_is_held(self) -> None:
        """Whoever folds the events has the same blocks as the cache, each of them once."""
        self.told = held_by(self.cache.take_events(), self.told)
        assert self.told == held_by(self.cache.held())
        assert set(self.told.values()) <= {1}

    @invariant()
    def what_is_cached_is_always_a_prefix(self) -> None:
        """No block is cached without all those before it: an eviction takes tails first."""
        cached = held_by(self.cache.held())
        assert all(PARENTS[block] == 0 or PARENTS[block] in cached for block in cached)


def test_the_cache_agrees_with_its_model() -> None:
    """Any order of what a scheduler does keeps the cache within its room and true to its events."""
    run_state_machine_as_test(CacheAgainstModel, settings=settings(stateful_step_count=40))


def run(cache: PagedCache, names: list[int]) -> int:
    """One whole sequence; returns how many blocks it found cached."""
    hit = cache.match(names)
    cache.take(names[:hit])
    assert cache.allocate(len(names) - hit)
    cache.commit(names[hit - 1] if hit else 0, names[hit:])
    cache.release(names, 0)
    return hit


def test_the_least_recently_used_goes_first_and_its_tail_before_its_head() -> None:
    """Of two idle prompts the older loses its last blocks; the newer keeps everything."""
    cache = PagedCache(12)
    run(cache, PROMPTS[3])
    run(cache, PROMPTS[2])
    run(cache, PROMPTS[3])
    assert cache.allocate(4)
    assert cache.match(PROMPTS[3]) == 6
    assert cache.match(PROMPTS[2]) == 2
    assert cache.allocate(4)
    assert (cache.match(PROMPTS[3]), cache.match(PROMPTS[2])) == (4, 0)
    assert not cache.allocate(5)
    assert cache.match(PROMPTS[3]) == 4, "a refusal evicts nothing"


def test_a_block_that_two_computed_is_kept_once() -> None:
    """The second copy is freed, and the block outlives the first sequence."""
    cache = PagedCache(4)
    for _ in range(2):
        assert cache.allocate(2)
        cache.commit(0, PROMPTS[4])
    assert (cache.used, cache.private) == (2, 0)
    assert held_by(cache.take_events()) == Counter(PROMPTS[4])
    cache.release(PROMPTS[4], 0)
    assert cache.used == 2
    cache.release(PROMPTS[4], 0)
    assert cache.used == 0
    assert cache.match(PROMPTS[4]) == 2
