"""What a decision expects of decoding: the time between tokens, and to the last one. It is recorded, and changes no choice."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.estimates import (
    DECODE_FLOOR,
    DECODE_OUTLIER,
    MEMORY_TOKENS,
    DecodeModel,
    predict_step_ms,
)
from headwater.router.state import RouterState
from headwater.schemas.events import LoadReported, WorkerJoined
from headwater.schemas.hashing import tenant_digest
from tests.support.data.story import tell
from tests.unit.router.test_estimates import BLOCKS, MS_A_TOKEN, ask, fleet, give, of, took

BASE_MS, REQUEST_MS, BLOCK_MS = 5.0, 2.0, 0.01


def steps(state: RouterState, worker: str, factor: float = 1.0) -> None:
    """Reports of a worker whose steps take longer with more requests and with more blocks; the last one is of an empty engine."""
    # A report describes what was running since the one before it.
    running, used = 1, 0
    for number in range(200):
        after, blocks = (number * 7) % 8 + 1, (number * 131) % 900
        if number == 199:
            after, blocks = 0, 0
        ms = factor * (BASE_MS + REQUEST_MS * running + BLOCK_MS * (used + blocks) / 2)
        told = LoadReported(
            after,
            0,
            blocks,
            BLOCKS,
            step_us=round(1_000 * ms),
            gaps=50,
            outputs=((10, 8),),
            answered=((1_600, 0),),
        )
        tell(state, told, writer=worker)
        running, used = max(1, after), blocks


def itl(requests: int, blocks: int) -> float:
    """Milliseconds between two tokens, once this request runs too."""
    return BASE_MS + REQUEST_MS * requests + BLOCK_MS * blocks


def test_the_time_between_tokens_is_that_of_the_load_with_this_request() -> None:
    """One more request than those dispatched, and the blocks in use with those of this prompt."""
    state = fleet(w1="both", w2="both", w3="both")
    steps(state, "w1")
    steps(state, "w2", 3.0)
    for number in range(4):
        give(state, "w1", 160, name=f"busy-{number}")
    tell(state, LoadReported(4, 0, 300, BLOCKS), writer="w1")
    decision = ask(state)
    assert of(decision, "w1").itl_ms == pytest.approx(itl(5, 300 + 100), rel=0.05)
    assert of(decision, "w2").itl_ms == pytest.approx(3 * itl(1, 100), rel=0.1)
    # Nothing is known of a worker that has generated nothing.
    assert (of(decision, "w3").itl_ms, decision.e2e_ms(of(decision, "w3"))) == (0.0, 0.0)


def test_a_worker_runs_no_more_requests_and_blocks_than_it_can() -> None:
    """Beyond that they wait, which is part of the time to the first token."""
    state = fleet(w1="both")
    steps(state, "w1")
    worker = state.loads.workers["w1"]
    worker.max_running = 3
    for number in range(6):
        give(state, "w1", 16, name=f"busy-{number}")
    tell(state, LoadReported(3, 3, 980, BLOCKS), writer="w1")
    assert of(ask(state, 6_400), "w1").itl_ms == pytest.approx(itl(3, BLOCKS), rel=0.05)


def test_the_whole_answer_takes_the_first_token_and_the_gaps_after_it() -> None:
    """Answers used 80 % of their limit, so one of 10 tokens at most has 8: seven gaps."""
    state = fleet(w1="both", w2="both")
    steps(state, "w1")
    give(state, "w1", 3_200)
    decision = ask(state)
    w1 = of(decision, "w1")
    assert decision.output_tokens == 8
    assert w1.ttft_ms == pytest.approx(MS_A_TOKEN * 3_200 + took(1_600))
    assert decision.e2e_ms(w1) == pytest.approx(w1.ttft_ms + 7 * w1.itl_ms)
    assert ask(state, max_tokens=1).e2e_ms(w1) == w1.ttft_ms


def test_answers_are_expected_by_tenant_and_prompt() -> None:
    """As reports have them; the decision records a digest of the tenant, by which it is made again."""
    state = fleet(w1="both")
    blue, red = (tenant_digest(name) for name in ("blue", "red"))
    answers = ((10, 8), (10, 2), (10, 5), (10, 5))
    answered = ((1_600, blue), (1_600, red), (16, red))
    told = LoadReported(0, 0, 0, BLOCKS, outputs=answers, answered=answered)
    for _ in range(50):
        tell(state, told, writer="w1")
    found = {name: ask(state, tenant=name) for name in ("blue", "red", "", "new")}
    assert {name: one.output_tokens for name, one in found.items()} == {"blue": 8, "red": 3, "": 5, "new": 5}
    assert [one.tenant for one in found.values()][:3] == [blue, red, 0]
    assert found["blue"].output_deviation < found["new"].output_deviation
    assert ask(state, 16, tenant="red").output_tokens > found["red"].output_tokens


def test_a_prefill_leg_has_the_steps_of_the_worker_that_will_decode() -> None:
    """The cheapest one, whose cost it includes; the decode leg itself has no prompt to compute."""
    state = fleet(p="prefill", d="decode", e="decode")
    steps(state, "d")
    steps(state, "e", 3.0)
    give(state, "e", 8_000)
    decision = ask(state)
    assert of(decision, "p").leg == "prefill"
    assert of(decision, "p").itl_ms == of(decision, "d").itl_ms == pytest.approx(itl(1, 100), rel=0.06)
    decode = ask(state, leg="decode", pairs_with="sim")
    found = of(decode, "d")
    assert decode.e2e_ms(found) == pytest.approx(found.transfer_ms + 7 * found.itl_ms)


def test_steps_change_no_choice() -> None:
    """Two workers that differ in nothing but their steps: the draw decides, as it does without."""
    bare, known = fleet(w1="both", w2="both"), fleet(w1="both", w2="both")
    steps(known, "w1", 5.0)
    steps(known, "w2")
    for number in range(20):
        plain, informed = ask(bare, name=f"q{number}"), ask(known, name=f"q{number}")
        assert (plain.worker, plain.digest) == (informed.worker, informed.digest)


def test_a_worker_that_restarts_keeps_what_is_known_of_its_steps() -> None:
    """As it keeps its pace."""
    state = fleet(w1="both")
    steps(state, "w1")
    before = ask(state)
    again = WorkerJoined("w1", 2, "m", "sim", "both", 16, BLOCKS, 256)
    tell(state, again, writer="w1", epoch=2)
    assert ask(state).chosen.itl_ms == before.chosen.itl_ms


# The model of decode steps: what it learns, from what, and what it says of loads that it has not seen.


def true_ms(requests: float, blocks: float) -> float:
    """Of an engine whose steps take longer with more requests and with more blocks."""
    return 6.0 + 0.8 * requests + 0.004 * blocks


def taught(count: int = 300, factor: float = 1.0, model: DecodeModel | None = None) -> DecodeModel:
    """After so many samples of any load."""
    draw = random.Random(1)
    model = model or DecodeModel()
    for _ in range(count):
        requests, blocks = draw.randrange(1, 32), draw.randrange(4_000)
        model.observe(factor * true_ms(requests, blocks), requests, blocks, draw.randrange(1, 200))
    return model


@pytest.mark.parametrize(("requests", "blocks"), [(1, 0), (1, 4_000), (32, 0), (32, 4_000), (16, 2_000)])
def test_it_finds_what_requests_and_blocks_add(requests: int, blocks: int) -> None:
    """Each by itself, within a few percent."""
    assert predict_step_ms(taught().line, requests, blocks) == pytest.approx(
        true_ms(requests, blocks), rel=0.04
    )


def test_a_sample_counts_by_its_tokens() -> None:
    """A report that follows a prompt is short, and most of its one gap is that prompt: it says little of a step."""
    model = DecodeModel()
    for _ in range(50):
        model.observe(10.0, 4, 100, 99)
        model.observe(30.0, 4, 100, 1)
    assert predict_step_ms(model.line, 4, 100) == pytest.approx(10.2, rel=0.005)


def test_a_load_that_never_varied_says_nothing_of_another() -> None:
    """The mean, whatever is asked; nothing at all before the first sample."""
    model = DecodeModel()
    assert predict_step_ms(model.line, 8, 900) == 0.0
    model.observe(9.0, 4, 500, 0)
    model.observe(0.0, 4, 500, 10)
    assert predict_step_ms(model.line, 8, 900) == 0.0
    for _ in range(20):
        model.observe(9.0, 4, 500, 50)
    assert predict_step_ms(model.line, 1, 0) == predict_step_ms(model.line, 64, 5_000) == pytest.approx(9.0)


def test_a_load_that_hardly_varied_says_little_of_another() -> None:
    """Far less than a line through points so close to each other would say."""
    model = DecodeModel()
    for number in range(100):
        model.observe(10.0 + number % 2 / 10, 100.0 + number % 2, 0, 20)
    # The line has 0.1 ms per request: 20 ms.
    assert predict_step_ms(model.line, 200, 0) == pytest.approx(10.05, abs=0.5)


def test_no_load_is_predicted_to_be_many_times_faster_than_what_was_seen() -> None:
    """A line through long steps may fall below zero for a load that was never seen."""
    model = DecodeModel()
    for number in range(100):
        model.observe(100.0 + 10 * (number % 11), 20 + number % 11, 0, 20)
    assert predict_step_ms(model.line, 1, 0) == pytest.approx(DECODE_FLOOR * 150, rel=0.01)


def test_load_never_makes_steps_faster() -> None:
    """Samples that say so (of an engine that warms up, say) are taken for the mean of what they are."""
    model = DecodeModel()
    for number in range(100):
        model.observe(30.0 - number / 5, 1 + number % 8, 10.0 * number, 20)
    low, high = predict_step_ms(model.line, 1, 0), predict_step_ms(model.line, 64, 2_000)
    assert low <= high
    assert DECODE_FLOOR * model.ms <= low


def test_it_follows_a_worker_that_becomes_slower_and_forgets_a_pause() -> None:
    """Twice as slow within a few memories; one gap of ten seconds counts as a few long steps."""
    model = taught()
    taught(300, 2.0, model)
    assert predict_step_ms(model.line, 16, 2_000) == pytest.approx(2 * true_ms(16, 2_000), rel=0.1)
    before = model.ms
    model.observe(10_000.0, 16, 2_000, 200)
    assert model.ms <= before * (1 + 200 / MEMORY_TOKENS * DECODE_OUTLIER)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(1, 10_000), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
    ),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 40),
)
def test_no_sample_makes_it_negative_or_undefined(
    samples: list[tuple[float, int, int, int]], requests: int, blocks: int
) -> None:
    """Whatever workers report."""
    model = DecodeModel()
    for ms, running, used, tokens in samples:
        model.observe(ms, running, used, tokens)
    assert 0.0 <= predict_step_ms(model.line, requests, blocks) < float("inf")
