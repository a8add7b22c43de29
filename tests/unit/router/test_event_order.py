"""Messages in any order: the fold never raises, and never counts a block whose way to the start is not held.

Messages of several workers in several lives are shuffled, told twice, dropped and unreadable, some with chains and some
as schema version 1 wrote them. A dictionary of counts is fed with what the fold admits; nothing but what it holds may be found.
"""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.events.ports import Record, Unreadable
from headwater.router.state import RouterState, StoredChains
from headwater.schemas.encoding import NO_DIGEST, Batch, decode_batch
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    KvGap,
    LoadReported,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.hashing import chain_plain, seed, unpack_hashes
from headwater.schemas.routing import RouteQuery
from tests.support.data.examples import packed
from tests.support.data.story import decided
from tests.support.worlds.chained_log import Teller
from tests.support.worlds.clock import WALL_NS

WRITERS = ("w1", "w2", "w3")
LENGTH = 8
ROOTS = (0, 0, 0, seed("adapter"))
PROMPTS = [
    chain_plain([number // 2] * 3 + [100 + number] * (LENGTH - 3), 1, ROOTS[number % 4])
    for number in range(6)
]


class Held:
    """What each worker holds, as the plainest reading of the events says."""

    def __init__(self) -> None:
        self.epochs: dict[str, int] = {}
        self.blocks: dict[str, Counter[tuple[int, int]]] = {}

    def fold(self, batch: Batch[Any], event: Event | StoredChains) -> None:
        """One event that was admitted."""
        match event:
            case WorkerJoined():
                if event.epoch > self.epochs.get(event.worker, -1):
                    self.epochs[event.worker], self.blocks[event.worker] = event.epoch, Counter()
                return
            case WorkerLeft():
                if self.epochs.get(event.worker) == event.epoch:
                    del self.epochs[event.worker], self.blocks[event.worker]
                return
            case _:
                pass
        if self.epochs.get(batch.writer) != batch.epoch:
            return
        blocks = self.blocks[batch.writer]
        match event:
            case StoredChains() | BlocksStored():
                names = event.hashes if isinstance(event, StoredChains) else unpack_hashes(event.hashes)
                blocks.update((event.tier, name) for name in names.tolist())
            case BlocksRemoved():
                for name in unpack_hashes(event.hashes).tolist():
                    if blocks[event.tier, name]:
                        blocks[event.tier, name] -= 1
            case BlocksCleared():
                blocks.clear()
            case _:
                pass

    def depth(self, worker: str, prompt: list[int], tiers: range) -> int:
        """How many of a prompt's first blocks it holds."""
        blocks = self.blocks[worker]
        for depth, name in enumerate(prompt):
            if not any(blocks[tier, name] for tier in tiers):
                return depth
        return len(prompt)


class Watched(RouterState):
    """A fold that tells what it admits."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def apply_to_index(self, batch: Batch[Any], event: Event | StoredChains) -> None:
        """Fold it twice."""
        super().apply_to_index(batch, event)
        self.held.fold(batch, event)


def a_log(draw: random.Random, turns: int) -> list[Record]:
    """Messages as they were written, in order."""
    teller = Teller(lambda most: draw.randint(0, most))
    for writer in WRITERS:
        teller.begin(writer)
    for _ in range(turns):
        writer = draw.choice(WRITERS)
        kind = draw.random()
        if kind < 0.05:
            teller.begin(writer)
        elif kind < 0.08:
            teller.tell("fleet", writer, WorkerLeft(writer, teller.epochs[writer], "stopped"))
        elif kind < 0.15:
            teller.tell("load", writer, LoadReported(1, 2, 3, 1000))
        else:
            teller.tell("kv", writer, *(_of_kv(draw) for _ in range(draw.choice((1, 1, 2, 4)))))
    records: list[Record] = []
    for number, (subject, data, _) in enumerate(teller.told, 1):
        batch = decode_batch(data)
        if draw.random() < 0.5:
            # As schema version 1 wrote it: nothing tells that it is out of place.
            batch = Batch(1, batch.writer, batch.epoch, batch.seq, batch.wall_ns, batch.events)
            assert batch.digest == NO_DIGEST
        records.append(Record(number, subject, WALL_NS, batch))
    return records


def _of_kv(draw: random.Random) -> Event:
    kind, tier = draw.random(), draw.choice((0, 0, 0, 1, 2, 3))
    prompt, start = draw.choice(PROMPTS), draw.randrange(LENGTH)
    run = packed(*prompt[start : start + draw.randint(1, LENGTH)])
    if kind < 0.65:
        # Parents are told as they are, or wrongly: a start that is none is no way to be found either.
        parent = prompt[start - 1] if start else ROOTS[PROMPTS.index(prompt) % 4]
        return BlocksStored(draw.choice((parent, parent, parent, 0, 12345)), run, tier)
    if kind < 0.92:
        return BlocksRemoved(run, tier)
    return BlocksCleared() if kind < 0.97 else KvGap(1)


def disordered(draw: random.Random, records: list[Record]) -> list[Record | Unreadable]:
    """Some told twice, some dropped, some unreadable, and all of them more or less shuffled."""
    found: list[Record | Unreadable] = []
    for record in records:
        chance = draw.random()
        if chance < 0.08:
            continue
        if chance < 0.12:
            found.append(Unreadable(record.position, record.subject, "damaged"))
            continue
        found += [record] * (2 if chance < 0.2 else 1)
    far = draw.choice((1, 4, 30, len(found) + 1))
    order = sorted(range(len(found)), key=lambda at: at + draw.random() * far)
    return [found[at]._replace(position=number) for number, at in enumerate(order, 1)]


def check(state: Watched) -> None:
    """What is found is what is held, to the block."""
    index, held = state.index, state.held
    assert set(index.slots) == set(held.epochs)
    for prompt in PROMPTS:
        _, depths = index.find(np.array(prompt, np.uint64))
        for worker, slot in index.slots.items():
            wanted = (held.depth(worker, prompt, range(1)), held.depth(worker, prompt, range(4)))
            assert (depths[0, slot], depths[1, slot]) == wanted
    assert index.blocks == {worker: len(+blocks) for worker, blocks in held.blocks.items()}
    decision = decided(state, RouteQuery("q", 16 * LENGTH + 1, 1, packed(*PROMPTS[0])), 1, 0)
    for candidate in decision.candidates if decision else ():
        most = 0 if candidate.worker in state.cold else held.depth(candidate.worker, PROMPTS[0], range(4))
        assert candidate.cached_blocks + candidate.lower_blocks == most


@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_in_any_order_only_what_is_held_is_found(draw: random.Random, turns: int) -> None:
    """The fold raises for nothing, and a block with a hole before it is no hit for the worker with the hole."""
    state = Watched()
    for message in disordered(draw, a_log(draw, turns)):
        state.take(message)
        check(state)


@given(st.randoms(use_true_random=False), st.integers(20, 60), st.integers(0, 60))
def test_a_disordered_log_can_be_cut_by_a_snapshot(draw: random.Random, turns: int, at: int) -> None:
    """Two replicas that read the same disorder agree, also if one of them began at a snapshot."""
    messages = disordered(draw, a_log(draw, turns))
    whole, part = RouterState(), RouterState()
    for number, message in enumerate(messages):
        if number == at:
            part = RouterState.restore(part.snapshot())
        for state in (whole, part):
            state.take(message)
    assert whole.digest() == part.digest()


@pytest.mark.parametrize("parent", [0, 12345, PROMPTS[0][2]])
def test_an_orphan_is_not_attached_to_the_start(parent: int) -> None:
    """Whatever it names as its parent, a block from the middle of a prompt is no hit without the blocks before it."""
    state = Watched()
    teller = Teller(lambda _: 0)
    teller.begin("w1")
    teller.tell("kv", "w1", BlocksStored(parent, packed(*PROMPTS[0][3:])))
    for number, (subject, data, _) in enumerate(teller.told, 1):
        state.apply(Record(number, subject, WALL_NS, decode_batch(data)))
    assert state.index.rows == LENGTH - 3
    deepest, depths = state.index.find(np.array(PROMPTS[0], np.uint64))
    assert deepest == 0
    assert not depths.any()
    check(state)
