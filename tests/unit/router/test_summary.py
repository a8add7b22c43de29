"""What a decision of a large fleet keeps of its candidates: little, enough to explain it, and a digest that shows any other cost."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.admission import first_token_s, uncached_tokens
from headwater.router.decide import (
    ALGORITHM,
    ALL_MAX,
    CannotRecompute,
    DecisionContext,
    Evaluation,
    evaluate,
    find_lowest,
    pack_rows,
    prompt_of,
    recompute,
    reevaluate,
    unpack_rows,
)
from headwater.router.queue import regret
from headwater.router.replay import Reconstruction, Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.encoding import encode_batch
from headwater.schemas.events import BlocksStored, LoadReported
from headwater.schemas.hashing import chain_plain, pack_hashes
from headwater.schemas.routing import Decision, RouteQuery, Weights
from tests.support.data.examples import batch, joined, record
from tests.support.data.queries import route_query
from tests.support.data.story import tell
from tests.support.worlds.clock import WALL_NS

PROMPT = np.array(chain_plain(list(range(64)), 1, 0), np.uint64)
EVENT_BYTES_MAX = 2_048


def large_fleet(workers: int, seed: int = 0) -> RouterState:
    """Workers with known step times, different loads, and different parts of one prompt."""
    draw, state = random.Random(seed), RouterState()

    def told(name: str, event: object) -> None:
        state.apply(record(state.position + 1, event, writer=name, wall_ns=WALL_NS))  # type: ignore[arg-type]

    for number in range(workers):
        name = f"worker-{number}"
        told(name, joined(name))
        told(name, BlocksStored(0, pack_hashes(PROMPT[: draw.randrange(1, 40)])))
        prefills = tuple((1 << draw.randrange(6, 13), draw.randrange(9_000, 20_000)) for _ in range(20))
        told(name, LoadReported(0, 0, draw.randrange(900), 1_000, prefills=prefills))
    return state


def made_on(state: RouterState, query: RouteQuery, number: int = 1) -> Evaluation:
    """A decision, with all its candidates."""
    context = DecisionContext(number, state.position, number - 1, WALL_NS, Weights(), False)
    made = evaluate(state.index, state.loads, state.cold, prompt_of(query), query, context)
    assert isinstance(made, Evaluation)
    return made


def question(request: str = "r-0-1", **constraints: object) -> RouteQuery:
    """A query for the prompt."""
    return route_query(request, 64 * 16 + 5, 10, pack_hashes(PROMPT), **constraints)


@pytest.mark.parametrize("workers", [3, 300])
def test_a_record_has_the_same_size_in_any_fleet(workers: int) -> None:
    """Also where most of the fleet is left out, and it can be recomputed all the same."""
    state = large_fleet(workers)
    excluded = tuple(f"worker-{number}.1" for number in range(workers) if number % 3)
    for query in (question(), question(exclude=excluded), question(exclude=(*excluded, "gone.7"))):
        decision = made_on(state, query).decision
        assert len(encode_batch(batch(decision))) < EVENT_BYTES_MAX
        assert decision.scored == workers - len([one for one in query.constraints.exclude if one in excluded])
        assert recompute(state.index, state.loads, state.cold, decision) == decision


def test_of_a_small_fleet_all_candidates_are_kept() -> None:
    """In order of their names."""
    made = made_on(large_fleet(ALL_MAX), question())
    assert made.decision.candidates == tuple(made.candidates)
    assert len(made_on(large_fleet(40), question()).decision.candidates) < 12


@given(st.integers(0, 1_000))
def test_what_others_ask_of_all_candidates_is_in_the_record(seed: int) -> None:
    """The regret, the fastest first token, with its queue and without, and the longest cached part."""
    state = large_fleet(12, seed)
    for at in range(4):
        state.loads.decide(made_on(state, question(f"q{at}", pinned=f"worker-{at}")).decision)
    made = made_on(state, question(), 5)
    whole = msgspec.structs.replace(made.decision, candidates=tuple(made.candidates))
    assert len(made.decision.candidates) < len(whole.candidates)
    assert regret(made.decision) == regret(whole)
    assert first_token_s(made.decision, queued=True) == first_token_s(whole, queued=True)
    assert first_token_s(made.decision, queued=False) == first_token_s(whole, queued=False)
    assert uncached_tokens(made.decision, state.loads) == uncached_tokens(whole, state.loads)


def test_the_digest_shows_a_cost_that_the_record_lacks() -> None:
    """One token more on a worker that the record does not name."""
    state = large_fleet(40)
    decision = made_on(state, question()).decision
    kept = {one.worker for one in decision.candidates}
    other = next(name for name in sorted(state.loads.workers) if name not in kept)
    full = LoadReported(0, 0, 1_000, 1_000)
    tell(state, full, writer=other, wall_ns=WALL_NS)
    again = recompute(state.index, state.loads, state.cold, decision)
    assert isinstance(again, Decision)
    assert again != decision
    assert msgspec.structs.replace(again, digest=decision.digest) == decision


def test_a_decision_of_another_algorithm_is_told_and_applied() -> None:
    """It is not compared with what this release would do; those after it are, on the state that it made."""
    state = large_fleet(10)
    first = msgspec.structs.replace(made_on(state, question("a")).decision, algorithm=ALGORITHM + 1)
    with pytest.raises(CannotRecompute, match=f"version {ALGORITHM + 1}"):
        reevaluate(state.index, state.loads, state.cold, first)
    position = state.position
    state.loads.decide(first)
    second = made_on(state, question("b"), 2)
    decisions = [
        Recorded(("r1", 1), first),
        Recorded(("r1", 1), msgspec.structs.replace(second.decision, seen=0, position=position)),
    ]
    replay = Replay(large_fleet(10), decisions)
    assert replay.start() is None
    assert (replay.verified, replay.other_algorithms) == (1, {ALGORITHM + 1: 1})


def test_all_candidates_are_reconstructed_from_the_log() -> None:
    """Those of the decisions that are wanted; where the state is another, it says so."""
    state = large_fleet(40)
    first = made_on(state, question("a"))
    expected = tuple(first.candidates)
    decisions = [Recorded(("r1", 1), first.decision)]
    run = Reconstruction(large_fleet(40), decisions, lambda one: one.request == "a")
    run.start()
    assert run.found[("r1", 1), 1].candidates == expected
    assert run.left == 0
    foreign = Reconstruction(large_fleet(40, seed=1), decisions, lambda one: True)
    foreign.start()
    assert not foreign.found[("r1", 1), 1].candidates
    assert foreign.found[("r1", 1), 1].problem


@given(st.lists(st.integers(0, 5).map(float), max_size=30), st.integers(1, 9))
def test_the_lowest_are_found_in_one_order(values: list[float], count: int) -> None:
    """Of equal ones the first, as a stable sort has them."""
    expected = sorted(range(len(values)), key=lambda at: values[at])[:count]
    assert sorted(find_lowest(np.array(values), count)) == sorted(expected)


@given(st.sets(st.integers(0, 40)), st.integers(41, 60))
def test_rows_are_kept_as_bits(rows: set[int], count: int) -> None:
    """They come back; those of a fleet of another size do not."""
    packed = pack_rows(sorted(rows), count)
    assert unpack_rows(packed, count) == sorted(rows)
    assert unpack_rows(packed, count + 8) is None
