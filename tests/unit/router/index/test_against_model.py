"""The prefix index against its model: small stories that shrink, and long ones that reach far."""

import random
from collections import Counter

import numpy as np
import pytest
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

from headwater.router.index.hash_table import tag_of
from headwater.router.index.prefix_index import MAX_BLOCKS, PrefixIndex
from tests.support.data.index_model import CHAINS, LENGTH, PARENTS, TAGS, TIERS, UNKNOWN, IndexModel, scatter

chains = st.sampled_from(CHAINS)
tiers = st.integers(0, TIERS - 1)
any_blocks = st.lists(st.sampled_from([*PARENTS, UNKNOWN, UNKNOWN + 1]), max_size=8)


class IndexAgainstModel(RuleBasedStateMachine):
    """Any order of what may happen to an index."""

    def __init__(self) -> None:
        super().__init__()
        self.model = IndexModel()

    def pick(self, data: st.DataObject) -> str:
        """Rather the first and the last workers: their bits lie at equal places of different words."""
        names = list(self.model.held)
        return data.draw(st.sampled_from(names[:2] + names[-2:]))

    @initialize(count=st.sampled_from([1, 3, 66, 130]), most=st.sampled_from([MAX_BLOCKS, MAX_BLOCKS, 20]))
    def begin(self, count: int, most: int) -> None:
        """Some workers are there from the start, and maybe not much room."""
        self.model = IndexModel(most)
        self.model.join(count)

    @rule(count=st.sampled_from([1, 1, 62]))
    def join(self, count: int) -> None:
        """Workers join."""
        self.model.join(count if len(self.model.held) < 140 else 0)

    @precondition(lambda self: self.model.held)
    @rule(
        data=st.data(),
        chain=chains,
        tier=tiers,
        start=st.integers(0, LENGTH - 1),
        length=st.integers(1, LENGTH),
        times=st.sampled_from([1, 2, 3]),
    )
    def store(
        self, data: st.DataObject, chain: list[int], tier: int, start: int, length: int, times: int
    ) -> None:
        """A part of a chain is stored, maybe more than once."""
        worker = self.pick(data)
        for _ in range(times):
            self.model.store(worker, tier, chain[start : start + length])

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), tier=tiers)
    def remove(self, data: st.DataObject, tier: int) -> None:
        """Blocks are removed, some of them twice, some that were never there."""
        worker = self.pick(data)
        mine = [block for place, block in self.model.held[worker] if place == tier]
        blocks = st.lists(st.sampled_from([*mine, UNKNOWN]), max_size=12) | any_blocks
        self.model.remove(worker, tier, data.draw(blocks))

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), what=st.sampled_from(["clear", "drop", "fill"]))
    def lose(self, data: st.DataObject, what: str) -> None:
        """A worker loses what it has, or leaves, or makes the table grow."""
        if what != "fill" or self.model.index.max_blocks == MAX_BLOCKS:
            getattr(self.model, what)(self.pick(data))

    @rule(seed=st.integers(0, 3))
    def scatter(self, seed: int) -> None:
        """No guess at a neighbouring row is right any more."""
        scatter(self.model.index, seed)

    @invariant()
    def it_tells_the_same(self) -> None:
        """Depths and counts, and its parts fit each other."""
        self.model.check_depths()
        self.model.check_counts()
        self.model.check_layout()

    def teardown(self) -> None:
        """The digest at the end."""
        self.model.check_digest()


def test_the_index_agrees_with_its_model() -> None:
    """Any sequence of stores, removals, clears, joins and leaves, with growth in between, is told right."""
    run_state_machine_as_test(IndexAgainstModel, settings=settings(stateful_step_count=25))


@pytest.mark.parametrize("seed", range(5))
def test_the_index_agrees_with_its_model_over_a_long_life(seed: int) -> None:
    """Well filled, with many copies and many workers, it still tells the same after each change."""
    draw, model = random.Random(seed), IndexModel(30 if seed == 4 else MAX_BLOCKS)
    model.join((2, 3, 66, 130, 5)[seed])
    for number in range(500):
        names = list(model.held)
        worker = draw.choice(names[:2] + names[-2:])
        chance, tier = draw.random(), draw.randrange(TIERS)
        if chance < 0.5:
            chain, start = draw.choice(CHAINS), draw.choice((0, 0, draw.randrange(LENGTH)))
            for _ in range(draw.choice((1, 1, 2, 3))):
                model.store(worker, tier, chain[start : start + 1 + draw.randrange(LENGTH)])
        elif chance < 0.92:
            mine = [block for place, block in model.held[worker] if place == tier]
            model.remove(worker, tier, draw.choices([*mine, UNKNOWN], k=draw.randrange(20)))
        elif chance < 0.96:
            model.clear(worker)
        elif chance < 0.98 and len(names) > 1:
            model.drop(worker)
        elif chance < 0.99:
            model.join(1)
        elif number > 400 and seed != 4:
            model.fill(worker)
        if number % 7 == 0:
            scatter(model.index, number)
        model.check_depths()
        model.check_counts()
        if number % 10 == 0:
            model.check_layout()
    assert (model.refused > 0) == (seed == 4)
    model.check_digest()


def test_the_blocks_of_the_model_crowd_together() -> None:
    """Homes at the two ends of a table that is not grown, for all of them: the hard case."""
    tags = Counter(int(tag_of(np.uint64(name))) for name in PARENTS)
    assert set(tags) == set(TAGS)
    assert min(tags.values()) > 10
    capacity = len(PrefixIndex().table)
    assert {tag * capacity >> 32 for tag in TAGS} == {0, capacity - 1}
