"""Policy slo: who meets the limits, and which of those gets the request. Policy lmetric: the product that it minimises."""

import msgspec
import pytest

from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored, LoadReported
from headwater.schemas.routing import Decision, Weights
from tests.support.data.examples import packed
from tests.support.data.story import tell
from tests.unit.router.test_estimates import BLOCKS, ask, fleet, give, took

TOKENS = 1_600
WEIGHTS = Weights(ttft_limit_ms=500.0, itl_limit_ms=25.0)


def choose(state: RouterState, weights: Weights = WEIGHTS, policy: str = "slo", name: str = "q") -> Decision:
    """The decision on a prompt whose blocks no worker has, unless a test stored them."""
    return ask(state, TOKENS, weights=weights, name=name, policy=policy)


def decoding(state: RouterState, worker: str, requests: int, step_ms: float) -> None:
    """So many requests whose prompts are computed get a token every `step_ms`."""
    names = tuple(f"{worker}-{number}" for number in range(requests))
    for name in names:
        give(state, worker, 160, name=name)
    report = LoadReported(requests, 0, 0, BLOCKS, names, names, step_us=round(step_ms * 1_000))
    tell(state, report, writer=worker)


def test_the_fullest_worker_within_both_limits_gets_the_request() -> None:
    """So the others stay free, where kv would spread."""
    state = fleet(w1="both", w2="both", w3="both")
    decoding(state, "w1", 4, 12.0)
    decoding(state, "w2", 8, 18.0)
    assert choose(state).worker == "w2"
    assert choose(state, policy="kv").worker == "w3"


def test_a_worker_whose_tokens_would_come_too_late_gets_none() -> None:
    """With 8 requests at 23 ms one more is predicted to make it 25.9 ms; at 22 ms, 24.75 ms."""
    for step_ms, worker in ((22.0, "w2"), (23.0, "w1")):
        state = fleet(w1="both", w2="both", w3="both")
        decoding(state, "w1", 4, 12.0)
        decoding(state, "w2", 8, step_ms)
        assert choose(state).worker == worker
        # The limit is a setting, in milliseconds.
        assert choose(state, msgspec.structs.replace(WEIGHTS, itl_limit_ms=26.0)).worker == "w2"


def test_an_idle_worker_is_not_judged_by_the_steps_of_requests_that_ended() -> None:
    """Its last report was of a full batch: that ended."""
    state = fleet(w1="both", w2="both", w3="both")
    decoding(state, "w1", 8, 60.0)
    ended = LoadReported(0, 0, 0, BLOCKS, finished=tuple(f"w1-{number}" for number in range(8)))
    tell(state, ended, writer="w1")
    decoding(state, "w2", 1, 20.0)
    # w2 would take 40 ms a token. Of the idle ones, w1 is as good as w3.
    chosen = {choose(state, name=f"q{number}").worker for number in range(30)}
    assert chosen == {"w1", "w3"}


def test_a_worker_whose_first_token_would_come_too_late_gets_none() -> None:
    """The queue counts, and the prompt itself."""
    state = fleet(w1="both", w2="both")
    give(state, "w1", 6_400)
    whole = choose(state, msgspec.structs.replace(WEIGHTS, ttft_limit_ms=10_000.0))
    assert whole.worker == "w1"
    waits = whole.chosen.queue_ms + whole.chosen.prefill_ms
    assert waits == pytest.approx(took(6_400 + TOKENS), rel=0.2)
    assert choose(state, msgspec.structs.replace(WEIGHTS, ttft_limit_ms=waits - 1)).worker == "w2"
    assert choose(state, msgspec.structs.replace(WEIGHTS, ttft_limit_ms=waits + 1)).worker == "w1"


def test_a_prefix_is_not_computed_again_to_pack_workers() -> None:
    """Among those in time, the one that holds most of the prompt; a fuller one would delay its own requests for nothing."""
    state = fleet(w1="both", w2="both", w3="both")
    decoding(state, "w1", 8, 10.0)
    tell(state, BlocksStored(0, packed(*range(1, 51))), writer="w2")
    assert choose(state).worker == "w2"


def test_where_no_worker_meets_the_limits_the_lowest_cost_does_as_little_harm_as_can_be() -> None:
    """As under kv; so too while step times are unknown."""
    state = fleet(w1="both", w2="both", w3="both")
    decoding(state, "w1", 9, 40.0)
    decoding(state, "w2", 5, 40.0)
    decoding(state, "w3", 7, 40.0)
    assert choose(state).worker == "w2" == choose(state, policy="kv").worker
    unknown = msgspec.structs.replace(WEIGHTS, estimate=False)
    assert choose(state, unknown).worker == "w2" == choose(state, unknown, policy="kv").worker


def test_lmetric_multiplies_the_tokens_to_compute_with_the_requests() -> None:
    """Half the prompt with two requests in all equals the whole prompt alone; less wins."""
    state = fleet(w1="both", w2="both")
    decoding(state, "w1", 1, 10.0)
    tell(state, BlocksStored(0, packed(*range(1, 50))), writer="w1")
    # 816 tokens x 2 against 1,600 x 1, then 800 x 2: a tie.
    assert choose(state, policy="lmetric").worker == "w2"
    tell(state, BlocksStored(0, packed(*range(1, 51))), writer="w1")
    assert {choose(state, policy="lmetric", name=f"q{number}").worker for number in range(30)} == {"w1", "w2"}
    tell(state, BlocksStored(0, packed(*range(1, 52))), writer="w1")
    assert choose(state, policy="lmetric").worker == "w1"
