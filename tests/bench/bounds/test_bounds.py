"""Bounds: no policy is below them on any trace, some runs reach them, and the parts that they are made of."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.sim import StepTime
from headwater.ops.bench.trace import Trace, TraceRequest
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.report import report_of
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup, Slowdown
from headwater.ops.whatif.workers import shapes
from tests.bench.bounds.bound import bounds_of, capacity_of
from tests.bench.bounds.fluid import FleetCapacity, shortest_first
from tests.bench.bounds.work import least_work, prompts_of, tokens_shared, tokens_unlimited
from tests.support.data.whatif_traces import conversations

pytestmark = pytest.mark.soak
"""They test tools of ours."""

ROUNDING = 1 - 1e-6
"""Steps are whole nanoseconds."""

ONE_RATE = FleetCapacity((0.0,), (1.0,))


def whole_blocks(trace: Trace) -> Trace:
    """The same prompts without their partial blocks: then one prompt's last block, which is not reused, is inside another's."""
    return Trace(
        trace.name,
        tuple(
            one._replace(
                prompt_tokens=max(1, one.prompt_tokens // 512) * 512,
                ids=one.ids[: max(1, one.prompt_tokens // 512)],
            )
            for one in trace.requests
        ),
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(("kv", "slo", "least_loaded", "round_robin", "session", "random")),
    workers=st.sampled_from(((1, 0, 0), (3, 0, 0), (2, 1, 1), (0, 2, 1))),
    blocks=st.sampled_from((60, 400)),
    whole=st.booleans(),
    gap_ms=st.sampled_from((1, 30, 300)),
    others=st.sampled_from(
        (
            {},
            {"worker_speeds": (1.0, 0.5)},
            {"slowdowns": (Slowdown("SECOND", 0.5, 3.0),)},
            {"step_tokens": 1_024},
            {"step_time": StepTime((1e-5, 0.01, 3.0), (2.0, 3.0, 4.0))},
            {"step_time": StepTime((0.0, 0.02, 0.0), (0.0, 0.0, 5.0))},
            {"event_delay_ms": 200.0, "routers": 2, "router_delay_ms": 50.0},
            {"pull_gb_per_s": 100.0},
        )
    ),
)
def test_no_policy_is_below_the_bounds(
    seed: int,
    policy: str,
    workers: tuple[int, int, int],
    blocks: int,
    whole: bool,
    gap_ms: int,
    others: dict[str, Any],
) -> None:
    """Means of TTFT and of E2E, and reuse, of all kinds of fleets, from an idle one to one that cannot keep up."""
    both, prefill, decode = workers
    trace = conversations(seed, 30, gap_ms=gap_ms)
    trace = whole_blocks(trace) if whole else trace
    name = "w000" if both else "p001"
    given_slow = tuple(one._replace(worker=name) for one in others.get("slowdowns", ()))
    setup = Setup(
        policy=policy,
        workers=both,
        prefill_workers=prefill,
        decode_workers=decode,
        blocks=blocks,
        busy_prefill_tokens=0,
        **{**others, **({"slowdowns": given_slow} if given_slow else {})},
    )
    found, bounds = report_of(run(trace, setup)), bounds_of(trace, setup)
    assert found.requests == bounds.requests
    for bound in (bounds.unlimited, bounds.queueing):
        assert found.ttft_ms.mean >= bound.ttft_mean * ROUNDING > 0
        assert found.e2e_ms.mean >= bound.e2e_mean * ROUNDING > 0
    assert bounds.unlimited.reuse is not None
    assert found.reuse <= bounds.unlimited.reuse + 1e-9
    assert bounds.queueing.ttft_mean >= bounds.unlimited.ttft_mean


def requests(*prompts: tuple[int, int, tuple[int, ...]]) -> Trace:
    """Prompts of (arrival in ms, tokens, ids), with one token of answer each."""
    return Trace(
        "few",
        tuple(
            TraceRequest(f"r{number}", at * 1_000_000, tokens, 1, ids)
            for number, (at, tokens, ids) in enumerate(prompts)
        ),
    )


@pytest.mark.parametrize("tokens", [400, 8_000, 16_000])
def test_a_request_alone_takes_what_the_bound_says(tokens: int) -> None:
    """Apart from steps that the scheduler fills more than is best. The worker turns slow later."""
    ids = tuple(range(-(-tokens // 512)))
    trace = Trace("one", (TraceRequest("a", 0, tokens, 40, ids),))
    setup = Setup(workers=1, slowdowns=(Slowdown("w000", 100.0, 5.0),))
    found, bound = report_of(run(trace, setup)), bounds_of(trace, setup).queueing
    assert found.ttft_ms.mean == pytest.approx(bound.ttft_mean, rel=0.01)
    assert found.e2e_ms.mean == pytest.approx(bound.e2e_mean, rel=0.01)


def test_a_queue_of_long_prompts_is_close_to_the_bound() -> None:
    """Twenty at once on one worker, without a constant in a step: the sum of their work decides. Alone each would take 1/10 of it."""
    setup = Setup(workers=1, policy="round_robin", step_time=StepTime((0.0, 0.02, 0.0), (0.0, 0.0, 0.001)))
    ids = itertools.count()
    trace = requests(*((0, 8_192, tuple(itertools.islice(ids, 16))) for _ in range(20)))
    found, bounds = report_of(run(trace, setup)), bounds_of(trace, setup)
    assert found.ttft_ms.mean == pytest.approx(bounds.queueing.ttft_mean, rel=0.001)
    assert bounds.unlimited.ttft_mean < found.ttft_ms.mean / 10


def test_decoding_that_fills_the_cache_is_in_the_bound() -> None:
    """Sixteen answers whose blocks fill the cache: with the step times of a full cache, as measured."""
    setup = Setup(workers=1, blocks=64, step_time=StepTime((0.0, 0.0, 1.0), (0.0, 50.0, 0.0)))
    trace = Trace(
        "full",
        tuple(
            TraceRequest(f"r{number}", 0, 2_000, 41, tuple(range(4 * number, 4 * number + 4)))
            for number in range(16)
        ),
    )
    found, bounds = report_of(run(trace, setup)), bounds_of(trace, setup)
    assert found.e2e_ms.mean > 40 * 50
    assert bounds.queueing.e2e_mean > 0.5 * found.e2e_ms.mean
    assert bounds.unlimited.e2e_mean < 0.1 * found.e2e_ms.mean


def test_a_price_bounds_traffic_that_shares_the_time_of_workers() -> None:
    """One request a step time of an empty cache: answers overlap, so their steps are longer than alone."""
    ids = itertools.count()
    trace = Trace(
        "steady",
        tuple(
            TraceRequest(f"r{number}", number * 12_000_000, 1_000, 100, (next(ids), next(ids)))
            for number in range(400)
        ),
    )
    setup = Setup(workers=1, blocks=400, step_time=StepTime((0.0, 0.0, 0.0), (0.0, 200.0, 2.0)))
    found, bounds = report_of(run(trace, setup)), bounds_of(trace, setup)
    assert bounds.queueing.e2e_mean > 1.5 * bounds.unlimited.e2e_mean
    assert found.e2e_ms.mean < 1.5 * bounds.queueing.e2e_mean


def test_the_work_until_a_moment() -> None:
    """Over changes of the capacity."""
    capacity = FleetCapacity((0.0, 10.0), (2.0, 1.0))
    assert [capacity.until(end) for end in (0.0, 4.0, 10.0, 15.0)] == [0.0, 8.0, 20.0, 25.0]


def test_blocks_are_counted_once() -> None:
    """By the first that has them; a last block is computed by its own request, and by no other one."""
    trace = requests((0, 1_024, (1, 2)), (5, 1_600, (1, 2, 3, 4)), (9, 1_600, (1, 2, 3, 5)))
    prompts = prompts_of(trace.requests, 512)
    # The second block ends the first prompt, so the first request computes it; the second shares it and adds one of its own.
    assert tokens_unlimited(prompts, 512).tolist() == [1_024, 512 + 64, 64]
    assert tokens_shared(prompts, 512, 100).tolist() == [1_024, 512 + 64, 64]
    later = prompts_of(trace.requests[::-1], 512)
    # Block 2 is the shorter prompt's in any case, whoever comes first.
    assert tokens_unlimited(later, 512).tolist() == [2 * 512 + 64, 64, 512]


def test_a_shared_cache_evicts_the_least_recently_used() -> None:
    """Of two prompts of two blocks each a cache of three keeps the head of the first; without eviction both hit."""
    trace = requests((0, 1_100, (1, 2, 3)), (1, 1_100, (4, 5, 6)), (2, 1_100, (1, 2, 7)))
    prompts = prompts_of(trace.requests, 512)
    assert tokens_shared(prompts, 512, 4).tolist() == [1_100, 1_100, 76]
    assert tokens_shared(prompts, 512, 3).tolist() == [1_100, 1_100, 588]
    assert tokens_shared(prompts, 512, 2).tolist() == [1_100, 1_100, 1_100]


@settings(max_examples=20)
@given(data=st.data())
def test_the_schedules_are_the_best(data: st.DataObject) -> None:
    """Compared with every fixed order of priorities, on capacity that changes."""
    count = data.draw(st.integers(1, 4))
    draw = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    arrivals = np.array(sorted(data.draw(draw)), np.float64)
    work = np.array(data.draw(draw), np.float64)
    capacity = FleetCapacity((0.0, 5.0), (2.0, data.draw(st.sampled_from((0.5, 3.0)))))
    ended = shortest_first(arrivals, work, capacity, remaining=True).completed
    spread = shortest_first(arrivals, work, capacity, remaining=False).busy
    for order in itertools.permutations(range(count)):
        completed, busy = by_priority(arrivals, work, capacity, order)
        assert ended.sum() <= completed.sum() + 1e-9
        assert spread.sum() <= busy.sum() + 1e-9


def by_priority(
    arrivals: np.ndarray[Any, Any],
    work: np.ndarray[Any, Any],
    capacity: FleetCapacity,
    order: tuple[int, ...],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """In slices of 1/4 ms, which a request may share with others: a schedule like any other."""
    slice_ms, now = 0.25, 0.0
    left, completed = work.copy(), arrivals.copy()
    busy = np.where(work > 0, 0.0, arrivals)
    while left.any():
        rate = capacity.rates[0] if now < capacity.from_ms[1] else capacity.rates[1]
        room = rate * slice_ms
        for number in order:
            if arrivals[number] <= now and left[number] and room:
                done = min(room, left[number])
                room -= done
                left[number] -= done
                busy[number] += done / work[number] * (now + slice_ms / 2)
                completed[number] = now + slice_ms
        now += slice_ms
    return completed, busy


def test_the_shortest_is_first() -> None:
    """It preempts by what is left, or by all of its work."""
    arrivals, work = np.array([0.0, 2.0]), np.array([6.0, 5.0])
    assert shortest_first(arrivals, work, ONE_RATE, remaining=True).completed.tolist() == [6, 11]
    found = shortest_first(arrivals, work, ONE_RATE, remaining=False)
    assert found.completed.tolist() == [11, 7]
    assert found.busy.tolist() == [pytest.approx((2 * 1 + 4 * 9) / 6), 4.5]


def test_capacity_is_the_sum_of_speeds() -> None:
    """Over time."""
    setup = Setup(workers=3, worker_speeds=(1.0, 0.5), slowdowns=(Slowdown("w000", 2.0, 4.0),))
    assert capacity_of(shapes(setup)) == FleetCapacity((0.0, 2_000.0), (2.5, 1.75))


def test_what_fits_no_worker_has_no_bound() -> None:
    """As it is refused. Without any request all is 0."""
    trace = requests((0, 1_000, (1, 2)), (0, 9_000, tuple(range(10, 28))))
    assert bounds_of(trace, Setup(workers=1, blocks=10)).requests == 1
    assert bounds_of(trace, Setup(workers=1, blocks=1)).unlimited.ttft_mean == 0.0


def test_step_times_that_shrink_are_refused() -> None:
    """A negative coefficient of prompts."""
    setup = Setup(step_time=StepTime((-1e-9, 0.01, 1.0)))
    prompts = prompts_of(requests((0, 1_000, (1, 2))).requests, 512)
    with pytest.raises(ConfigError, match="negative part"):
        least_work(prompts, np.array([1_000.0]), setup)
