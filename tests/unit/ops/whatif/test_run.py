"""Runs on virtual time: the peer's timings, skipped steps, determinism, legs, and what a full cache does."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.ops.bench.trace import TRACE_BLOCK, Trace, TraceRequest
from headwater.ops.whatif.report import ServedTimes, Spread, WhatifReport, as_data, report_of, spread_of
from headwater.ops.whatif.run import RunResult, ServedRequest, run
from headwater.ops.whatif.setup import Setup, Slowdown
from headwater.ops.whatif.workers import SimulatedRequest, SimWorker, shapes
from headwater.schemas.routing import Weights
from tests.support.data.whatif_traces import conversations

TTFT_MS = [(64, 23.218), (1_000, 37.899), (8_000, 171.063), (16_000, 336.415)]
"""Prompt tokens and the peer's time to the first token on an idle worker."""

ITL_MS = [(32, 13.55), (128, 29.44)]
"""Requests of 1,000 + 500 tokens at once on 262,144 tokens of cache, and the peer's median between two tokens."""


def alone(tokens: int, output: int = 1, number: int = 0, at_ns: int = 0) -> TraceRequest:
    """A request whose blocks nobody else has."""
    first = number * 1_000
    return TraceRequest(
        f"r{number}", at_ns, tokens, output, tuple(range(first, first + -(-tokens // TRACE_BLOCK)))
    )


def facts(ran: RunResult) -> list[tuple[object, ...]]:
    """All that can differ between two runs."""
    return [(*one,) for one in ran.served]


@pytest.mark.parametrize(("tokens", "wanted_ms"), TTFT_MS)
def test_the_first_token_on_an_idle_worker_comes_when_the_peers_does(tokens: int, wanted_ms: float) -> None:
    """Within one part in a hundred."""
    ran = run(Trace("one", (alone(tokens),)), Setup(workers=1))
    assert ran.served[0].first_ns / 1e6 == pytest.approx(wanted_ms, rel=0.01)


@pytest.mark.parametrize(("count", "wanted_ms"), ITL_MS)
def test_tokens_follow_each_other_as_the_peers_do(count: int, wanted_ms: float) -> None:
    """The more of the cache is in use the longer a step takes."""
    requests = tuple(alone(1_000, 500, number) for number in range(count))
    ran = run(Trace("many", requests), Setup(workers=1, blocks=16_384, block_size=16))
    # The last one that began decodes beside all the others and no prompt.
    last = max(ran.served, key=lambda one: one.first_ns)
    assert (last.done_ns - last.first_ns) / 499 / 1e6 == pytest.approx(wanted_ms, rel=0.03)


@settings(max_examples=12)
# A worker that begins with a request whose KV has arrived reports one less that waits, which lets the next one of the queue go.
@example(0, "round_robin", (0, 2, 2), 40, 128, 3, (0, 1), ("d000", 1.5))
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(("kv", "round_robin")),
    workers=st.sampled_from(((1, 0, 0), (3, 0, 0), (1, 1, 1), (0, 2, 2))),
    blocks=st.sampled_from((40, 90, 400)),
    block_size=st.sampled_from((128, 512)),
    sequences=st.sampled_from((3, 256)),
    busy=st.sampled_from(((131_072, 0), (3_000, 0), (0, 1))),
    slow=st.sampled_from((("d000", 1.5), ("w000", 0.7))),
)
def test_skipping_steps_changes_nothing(
    seed: int,
    policy: str,
    workers: tuple[int, int, int],
    blocks: int,
    block_size: int,
    sequences: int,
    busy: tuple[int, int],
    slow: tuple[str, float],
) -> None:
    """Steps taken together end where they would one by one, with the same decisions on the way."""
    both, prefill, decode = workers
    name, at_s = slow
    slow_too = (Slowdown(name, at_s, 3.0),) if (both if name == "w000" else decode) else ()
    setup = Setup(
        worker_speeds=(1.0, 0.5),
        slowdowns=slow_too,
        policy=policy,
        workers=both,
        prefill_workers=prefill,
        decode_workers=decode,
        blocks=blocks * 512 // block_size,
        block_size=block_size,
        sequences=sequences,
        busy_prefill_tokens=busy[0],
        busy_waiting=busy[1],
    )
    trace = conversations(seed, 25)
    skipped, stepped = run(trace, setup), run(trace, msgspec.structs.replace(setup, skip=False))
    assert facts(skipped) == facts(stepped)
    assert skipped.refused == stepped.refused
    assert skipped.routers.state.digest() == stepped.routers.state.digest()
    assert len(skipped.served) + skipped.refused == 25


def test_the_same_run_twice_is_the_same() -> None:
    """Digest and all, also of the router's state; another policy is another run."""
    trace = conversations(7, 200)
    setup = Setup(workers=3, blocks=200)
    first, again = run(trace, setup), run(trace, setup)
    assert facts(first) == facts(again)
    assert report_of(first).digest == report_of(again).digest
    assert first.routers.state.digest() == again.routers.state.digest()
    other = report_of(run(trace, msgspec.structs.replace(setup, policy="round_robin")))
    assert other.digest != report_of(first).digest


def test_a_cache_that_is_too_small_preempts_and_everything_ends() -> None:
    """The newest gives its blocks up; nobody is lost, and what fits no worker is refused."""
    # Each prompt is 4 blocks and each answer grows by 8 more: two of them do not fit.
    requests = (*(alone(2_000, 4_000, number) for number in range(4)), alone(20 * 512, 600, 9))
    ran = run(Trace("tight", requests), Setup(workers=1, blocks=20))
    assert sum(worker.scheduler.preemptions for worker in ran.workers) > 0
    assert {one.request.name for one in ran.served} == {"r0", "r1", "r2", "r3"}
    assert ran.refused == 1
    assert [worker.cache.used for worker in ran.workers] == [0]


def test_a_prompt_computed_elsewhere_is_moved_and_goes_on() -> None:
    """Prefill there, its KV over the link, the first token here: the time is the sum, and nothing stays pinned."""
    setup = Setup(
        workers=0, prefill_workers=1, decode_workers=1, transfer_gb_per_s=1.0, weights=Weights(apart=True)
    )
    ran = run(Trace("one", (alone(8_000, 5),)), setup)
    [one] = ran.served
    assert (one.prefill_worker, one.worker) == ("p000", "d000")
    # The first token comes of a step that computes the prompt's last token once more.
    moved_ms = 8_000 * 131_072 / 1e9 * 1e3
    again_ms = setup.step_time.seconds(1, 16 / 4_000, True) * 1e3
    assert one.first_ns / 1e6 == pytest.approx(171.063 + moved_ms + again_ms, rel=0.01)
    assert [worker.cache.used for worker in ran.workers] == [0, 0]
    assert report_of(ran).handed_over == 1


def test_requests_wait_at_the_router_while_all_workers_are_busy() -> None:
    """Ten at once, one worker that takes a prompt at a time: all wait but the first, in the production queue's order."""
    sizes = (4_000, 9_000, 2_000, 6_000, 1_000)
    trace = Trace("burst", tuple(alone(size, 2, number) for number, size in enumerate(sizes)))
    setup = Setup(workers=1, busy_prefill_tokens=1)
    ran = run(trace, setup)
    # The most particular of a burst is decided first; where all would lose the same, who came first.
    assert [one.request.name for one in ran.served] == ["r0", "r1", "r2", "r3", "r4"]
    report = report_of(ran)
    assert report.waited == 4
    assert report.router_queue_ms.mean > 10 * report.queue_ms.mean
    shortest = run(trace, msgspec.structs.replace(setup, queue_order="shortest_uncached"))
    assert [one.request.name for one in shortest.served] == ["r0", "r4", "r2", "r3", "r1"]
    impatient = run(trace, msgspec.structs.replace(setup, queue_wait_s=0.1))
    assert impatient.refused > 0
    assert len(impatient.served) + impatient.refused == 5
    assert report_of(run(trace, Setup(workers=1))).waited == 0


def test_the_state_at_the_end_knows_what_the_caches_hold() -> None:
    """The router was told everything: nobody has work left, and its index is the caches'."""
    ran = run(conversations(3, 120), Setup(workers=3, blocks=60))
    state = ran.routers.state
    for worker in ran.workers:
        name = worker.shape.name
        assert not state.loads.workers[name].requests
        assert state.index.blocks[name] == len(worker.cache)


def test_the_report_is_json_of_a_stated_form() -> None:
    """Everything has a name, and it adds up."""
    ran = run(conversations(5, 60), Setup(workers=2))
    report = report_of(ran)
    data = msgspec.json.decode(msgspec.json.encode(as_data(report)))
    assert set(data) == set(WhatifReport.__struct_fields__)
    assert set(data["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
    assert data["setup"]["weights"]["crowding"] == Weights().crowding
    assert msgspec.convert(data["setup"]["step_time"], dict[str, tuple[float, float, float]])
    assert sum(report.balance.requests.values()) == report.requests == report.decisions == 60
    assert 0 < report.reuse < 1
    assert report.ttft_ms.p50 <= report.ttft_ms.p90 <= report.ttft_ms.p99
    assert report.e2e_ms.mean > report.ttft_ms.mean > report.queue_ms.mean >= 0


def test_figures_of_served_requests() -> None:
    """Blocks count with a partial one, and each token weighs the same."""
    served = [
        ServedRequest(alone(1_025, 3), "w", "", 1, 0, 0, 4_000_000, 8_000_000),
        ServedRequest(alone(512, 1, 1, 1_000_000), "w", "", 1, 1_000_000, 1_000_000, 2_000_000, 2_000_000),
    ]
    times = ServedTimes(served, 512)
    assert (times.reuse, times.itl_ms) == (2 / 4, 2.0)
    assert times.ttft.tolist() == [4_000_000, 1_000_000]
    assert times.e2e.tolist() == [8_000_000, 1_000_000]
    assert spread_of(times.ttft, 1e6) == Spread(2.5, 2.5, 3.7, 3.97)
    nothing = ServedTimes([], 512)
    assert (nothing.reuse, nothing.itl_ms, spread_of(nothing.ttft)) == (0.0, 0.0, Spread(0.0, 0.0, 0.0, 0.0))


def test_an_idle_worker_reports_once() -> None:
    """More such reports would change nothing in the fold; with anything to tell it reports again."""
    [shape] = shapes(Setup(workers=1, blocks=10, block_size=16))
    worker = SimWorker(shape)
    assert worker.regular_report(1) is not None
    assert worker.regular_report(2) is None
    assert worker.reported_ns == 2
    request = alone(20, 2)
    job = SimulatedRequest(20, 20, hashes=[1], name="a", number=0, request=request, leg="", worker=worker)
    worker.submit(job, 3)
    assert worker.regular_report(4) is not None
    assert worker.begin(5)
    assert worker.regular_report(6) is not None
    assert worker.regular_report(7) is not None
