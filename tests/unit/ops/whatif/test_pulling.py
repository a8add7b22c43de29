"""Pulled prefixes: when one is chosen, how long it takes, what happens if the source has lost it, and that nothing is kept."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engines.sim.step_time import StepTime
from headwater.ops.whatif.fleet.pull import LinkQueue, PullLink, choose_pull
from headwater.ops.whatif.pulling import Pulls
from headwater.ops.whatif.report import as_table, report_of
from headwater.ops.whatif.routing.routers import Routers
from headwater.ops.whatif.run import RunResult, run
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Trace, TraceRequest
from headwater.ops.whatif.workers import SimulatedRequest, SimWorker, shapes
from headwater.schemas.events.event import Event
from headwater.schemas.events.route import PrefixPull
from tests.support.data.whatif_traces import conversations

STEPS = StepTime((0.0, 0.1, 0.0), (0.0, 0.0, 1.0))
"""51.2 ms for a block, 1 ms for a token."""

PER_BLOCK_MS = 10.0
"""With the link of `setup`."""


def setup(workers: int = 2, **others: object) -> Setup:
    """A link on which a block takes 10 ms, and a pull 5 ms in addition. Round robin, so that the second request is elsewhere."""
    given_settings = Setup(
        policy="round_robin",
        workers=workers,
        blocks=100,
        step_time=STEPS,
        kv_bytes_per_token=1_000,
        pull_gb_per_s=512 * 1_000 / PER_BLOCK_MS / 1e6,
        pull_latency_ms=5.0,
        pull_choice="simulation",
        busy_prefill_tokens=0,
    )
    return msgspec.structs.replace(given_settings, **others)


def prompts(*each: tuple[int, int, tuple[int, ...]]) -> Trace:
    """(arrival in ms, tokens, ids), one token of answer each."""
    return Trace(
        "few",
        tuple(
            TraceRequest(f"r{number}", at * 1_000_000, tokens, 1, ids)
            for number, (at, tokens, ids) in enumerate(each)
        ),
    )


TWO = prompts((0, 1_124, (1, 2, 3)), (1_000, 1_124, (1, 2, 4)))
"""The second has two blocks of the first, and 100 tokens of its own."""


def ttft_ms(ran: RunResult) -> list[float]:
    """By request."""
    return [
        (one.first_ns - one.request.arrival_ns) / 1e6
        for one in sorted(ran.served, key=lambda one: one.request.name)
    ]


def test_a_prefix_is_pulled_where_that_is_quicker() -> None:
    """25 ms for two blocks instead of 102.4; the request's own tokens are computed after."""
    ran = run(TWO, setup())
    assert {one.worker for one in ran.served} == {"w000", "w001"}
    assert ttft_ms(ran) == [pytest.approx(113.4), pytest.approx(25 + 10 + 1)]
    report = report_of(ran)
    assert (report.pulled, report.pulled_blocks) == (1, 2)
    assert [one.hit_blocks for one in sorted(ran.served, key=lambda one: one.request.name)] == [0, 2]
    assert "pulled blocks" in as_table([report])
    assert ttft_ms(run(TWO, setup(pull_gb_per_s=0.0)))[1] == pytest.approx(113.4)


def test_the_last_block_of_a_prompt_is_not_pulled() -> None:
    """Its last token is always computed, so of two equal prompts of two blocks one block is reused."""
    ran = run(prompts((0, 1_024, (1, 2)), (1_000, 1_024, (1, 2))), setup())
    assert report_of(ran).pulled_blocks == 1
    assert ttft_ms(ran)[1] == pytest.approx(15 + 51.2 + 1)


def test_the_router_learns_of_pulled_and_evicted_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the pull begins and when it ends, not when the next step does."""
    sent: list[tuple[str, float, str]] = []
    real = Routers.send

    def send(self: Routers, name: str, now_ns: int, *events: Event) -> None:
        sent.extend((name, now_ns / 1e6, type(one).__name__) for one in events)
        real(self, name, now_ns, *events)

    monkeypatch.setattr(Routers, "send", send)
    # The second worker's four blocks are full of another prompt's when it pulls two.
    trace = prompts(
        (0, 1_124, (1, 2, 3)), (1, 2_040, (5, 6, 7, 8)), (1_000, 200, (9,)), (2_000, 1_124, (1, 2, 4))
    )
    ran = run(trace, setup(blocks=4))
    [last] = [one for one in ran.served if one.request.name == "r3"]
    assert report_of(ran).pulled == 1
    assert (last.worker, 2_000.0, "BlocksRemoved") in sent
    assert (last.worker, 2_025.0, "BlocksStored") in sent


def test_steps_of_the_source_are_longer_while_blocks_are_pinned() -> None:
    """Its share of blocks in use decides: from the step after the pull begins, up to the one after it ends."""
    steps = StepTime((0.0, 0.1, 0.0), (0.0, 100.0, 1.0))
    trace = prompts((0, 100, (3,)), (1, 100, (6,)), (2, 1_124, (1, 2, 4)), (400, 1_124, (1, 2, 5)))
    decodes = trace.requests[0]._replace(output_tokens=300)
    trace = trace._replace(requests=(decodes, *trace.requests[1:]))
    ran, stepped = (run(trace, setup(step_time=steps, skip=skip)) for skip in (True, False))
    assert report_of(ran).pulled == 1
    # Two blocks are 2 % of the cache, so 2 ms for each step that begins in the 25 ms of the pull.
    alone = run(trace, setup(step_time=steps, pull_gb_per_s=0.0))
    ends = [next(one.done_ns for one in each.served if one.request.name == "r0") for each in (ran, alone)]
    assert 0 < (ends[0] - ends[1]) / 2e6 <= 13
    assert sorted(one.done_ns for one in ran.served) == sorted(one.done_ns for one in stepped.served)


def test_a_slow_link_is_not_used() -> None:
    """100 ms of latency and 20 for the blocks are more than 102.4."""
    ran = run(TWO, setup(pull_latency_ms=100.0))
    assert ttft_ms(ran)[1] == pytest.approx(113.4)
    assert not report_of(ran).pulled


def test_the_worker_computes_others_meanwhile() -> None:
    """A prompt that arrives during the pull is computed first, and the pull takes no longer."""
    trace = prompts((0, 1_124, (1, 2, 3)), (1_000, 1_124, (1, 2, 4)), (1_001, 200, (9,)), (1_001, 200, (10,)))
    ran = run(trace, setup())
    [beside] = [one for one in ran.served if one.request.name in ("r2", "r3") and one.worker == "w001"]
    assert (beside.first_ns - beside.request.arrival_ns) / 1e6 == pytest.approx(21)
    # It arrives at 1,025 ms, three after the other prompt's step has ended.
    assert ttft_ms(ran)[1] == pytest.approx(36)


def test_pulls_of_one_source_wait_for_each_other() -> None:
    """Two requests at the same time on two other workers: the second pull begins when the first has ended."""
    trace = prompts((0, 1_124, (1, 2, 3)), (1_000, 1_124, (1, 2, 4)), (1_000, 1_124, (1, 2, 5)))
    ran = run(trace, setup(workers=3))
    assert len({one.worker for one in ran.served}) == 3
    assert sorted(ttft_ms(ran)[1:]) == [pytest.approx(36), pytest.approx(25 + 36)]


def worker(name: str, blocks: int = 10) -> SimWorker:
    """An idle one."""
    [shape] = shapes(Setup(workers=1, blocks=blocks, block_size=16))
    return SimWorker(shape._replace(name=name))


def job(name: str = "a", hashes: int = 3) -> SimulatedRequest:
    """A prompt of so many full blocks of 16 tokens, and 8 tokens more."""
    tokens = 16 * hashes + 8
    return SimulatedRequest(
        length=tokens,
        target=tokens,
        hashes=list(range(1, hashes + 1)),
        name=name,
        number=0,
        leg="",
        prompt_tokens=tokens,
        output_tokens=1,
    )


def fill(one: SimWorker, hashes: list[int]) -> None:
    """Cache these blocks, without a user."""
    assert one.cache.allocate(len(hashes))
    one.cache.commit(0, hashes)
    one.cache.release(hashes, 0)


def test_a_pull_names_an_incarnation_and_blocks_that_are_there() -> None:
    """Otherwise it is refused, and both workers are as before: the request is computed as usual."""
    source, target = worker("s"), worker("t")
    pulls = Pulls(Setup(block_size=16, pull_gb_per_s=1.0), {"s": source, "t": target})
    fill(source, [1, 2])
    for pull in (PrefixPull("s", source.epoch + 1, 0, 2), PrefixPull("s", source.epoch, 0, 3)):
        assert pulls.begin(pull, job(), target, 0) is None
    # The target lacks block 1, which the pull does not bring.
    assert pulls.begin(PrefixPull("s", source.epoch, 1, 2), job(), target, 0) is None
    full = worker("t", blocks=1)
    fill(full, [1])
    assert pulls.begin(PrefixPull("s", source.epoch, 1, 2), job(), full, 0) is None
    assert (pulls.refused, pulls.count) == (4, 0)
    assert [one.cache.used for one in (source, target, full)] == [0, 0, 0]
    assert [one.pulling for one in (target, full)] == [0, 0]


def test_blocks_are_kept_at_both_ends_until_they_are_used() -> None:
    """At the source until they have arrived, at the target until the request runs; it waits there, and reports that."""
    source, target = worker("s"), worker("t")
    pulls = Pulls(Setup(block_size=16, pull_gb_per_s=1.0), {"s": source, "t": target})
    fill(source, [1, 2, 3])
    active = pulls.begin(PrefixPull("s", source.epoch, 0, 2), job(), target, 0)
    assert active is not None
    assert (source.cache.used, target.cache.used) == (2, 2)
    report = target.report(0)
    assert (report.waiting, report.accepted) == (1, ("a",))
    # A worker whose only request is on its way is not idle.
    assert target.regular_report(1) is not None
    assert target.regular_report(2) is not None
    assert not target.begin(0)
    assert not pulls.end(active, active.end_ns)
    assert (source.cache.used, target.cache.used) == (0, 2)
    assert target.begin(active.end_ns)
    target.finish()
    assert target.cache.used == 0
    assert target.cache.match([1, 2, 3]) == 3
    assert target.report(active.end_ns).cached == (32,)


def test_pulled_blocks_of_waiting_requests_never_block_a_worker() -> None:
    """Two requests have pulled all that fits, and neither could run: what they pulled is evicted, and both are served."""
    source, target = worker("s"), worker("t", blocks=6)
    pulls = Pulls(Setup(block_size=16, pull_gb_per_s=1.0), {"s": source, "t": target})
    fill(source, [1, 2, 3])
    other = job("b")
    other.hashes = [11, 12, 13]
    fill(source, other.hashes)
    for one in (job("a"), other):
        pull = PrefixPull("s", source.epoch, 0, 3)
        active = pulls.begin(pull, one, target, 0)
        assert active is not None
        pulls.end(active, active.end_ns)
    assert target.cache.available == 0
    served = []
    while target.begin(target.stretch.end_ns if target.stretch else 0):
        served += [done.name for done in target.finish().done]
    assert sorted(served) == ["a", "b"]
    assert target.cache.used == 0


def times(held: dict[str, tuple[int, int]], usable: int = 9, slow: str = "") -> PrefixPull | None:
    """10 per block to pull, 1,000 more from `slow`; 30 per block to compute."""
    return choose_pull(
        held,
        "t",
        usable,
        pull_ns=lambda source, blocks: 10 * blocks + (1_000 if source == slow else 0),
        compute_ns=lambda first, end: 30 * (end - first),
    )


def test_the_longest_prefix_from_the_quickest_source() -> None:
    """What the target has itself is not pulled, nor what cannot be reused; what is slower than computing is not pulled either."""
    assert times({"a": (5, 1), "b": (7, 2), "c": (7, 3)}) == PrefixPull("b", 2, 0, 7)
    assert times({"b": (7, 2), "c": (7, 3)}, slow="b") == PrefixPull("c", 3, 0, 7)
    assert times({"b": (7, 2), "t": (4, 9)}) == PrefixPull("b", 2, 4, 7)
    assert times({"b": (7, 2)}, usable=3) == PrefixPull("b", 2, 0, 3)
    assert times({"b": (7, 2)}, slow="b") is None
    assert times({"b": (7, 2), "t": (7, 9)}) is None
    assert times({"t": (7, 9)}) is None
    assert times({}) is None


def test_a_link_is_used_by_one_pull_at_a_time() -> None:
    """In each direction of each worker."""
    links = LinkQueue(PullLink(1.0, 0.001, 500))
    assert links.occupy("a", "b", 2, 100) == 100 + 1_000 + 1_000
    assert links.end_ns("a", "c", 1, 100) == 2_100 + 1_500
    assert links.end_ns("c", "b", 1, 100) == 2_100 + 1_500
    # The other directions are free.
    assert links.end_ns("b", "a", 1, 100) == 1_600


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(("kv", "round_robin")),
    workers=st.sampled_from(((3, 0, 0), (1, 1, 1))),
    blocks=st.sampled_from((40, 400)),
    rate=st.sampled_from((2.0, 50.0)),
    delay_ms=st.sampled_from((0.0, 400.0)),
)
def test_with_pulls_every_request_is_served_and_nothing_stays_pinned(
    seed: int, policy: str, workers: tuple[int, int, int], blocks: int, rate: float, delay_ms: float
) -> None:
    """Also in caches that are too small, and with a router whose knowledge is old. Skipping steps changes nothing."""
    both, prefill, decode = workers
    given_settings = Setup(
        policy=policy,
        workers=both,
        prefill_workers=prefill,
        decode_workers=decode,
        blocks=blocks,
        pull_gb_per_s=rate,
        event_delay_ms=delay_ms,
    )
    trace = conversations(seed, 25)
    ran = run(trace, given_settings)
    assert len(ran.served) + ran.refused == 25
    for one in ran.workers:
        assert one.cache.used == one.pulling == 0
        if not delay_ms:
            assert ran.routers.state.index.blocks[one.shape.name] == len(one.cache)
    stepped = run(trace, msgspec.structs.replace(given_settings, skip=False))
    assert [(*one,) for one in ran.served] == [(*one,) for one in stepped.served]
    assert ran.routers.state.digest() == stepped.routers.state.digest()
