"""Step times: the peer's own replay on one idle worker, and the engine that runs on them."""

from itertools import pairwise
from statistics import median

import pytest

from headwater.engines.engine import Step
from headwater.engines.sim import ZERO, StepTime
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling
from tests.support.worlds.clock import SkippingClock, settle

TTFT_MS = [(64, 23.218), (1_000, 37.899), (8_000, 171.063), (16_000, 336.415)]
"""Prompt tokens, and milliseconds to the first token on an idle worker, as the peer's replay has them."""

ITL_MS = [(32, 13.55), (128, 29.44)]
"""Requests of 1,000 + 500 tokens at once on 262,144 tokens of cache, and the median between two tokens."""

STEP_TOKENS_MAX = 8_192


def test_a_step_is_the_sum_of_its_parts() -> None:
    """prefill(x) + decode(p), neither where there is none of it."""
    model = StepTime()
    assert model.seconds(0, 0.0, False) == 0.0
    assert model.seconds(0, 0.0, True) == pytest.approx(5.74e-3)
    assert model.seconds(0, 1.0, True) == pytest.approx((5.74 + 54.01 - 25.74) / 1000)
    assert model.seconds(0, 0.5, True) == pytest.approx((5.74 + 54.01 * 0.5 - 25.74 * 0.25) / 1000)
    alone = model.seconds(1_000, 0.5, False)
    assert alone == pytest.approx((4.209989e-07 * 1e6 + 1.518344e-02 * 1e3 + 16.50142) / 1000)
    assert model.seconds(1_000, 0.5, True) == pytest.approx(alone + model.seconds(0, 0.5, True))


@pytest.mark.parametrize(("tokens", "wanted_ms"), TTFT_MS)
def test_the_first_token_of_an_idle_worker_comes_when_the_peers_does(tokens: int, wanted_ms: float) -> None:
    """Chunks of at most 8,192 tokens, and one decode, within one part in a hundred."""
    model = StepTime()
    chunks = [min(STEP_TOKENS_MAX, tokens - at) for at in range(0, tokens, STEP_TOKENS_MAX)]
    last = len(chunks) - 1
    total = sum(model.seconds(chunk, 0.0, number == last) for number, chunk in enumerate(chunks))
    assert total * 1000 == pytest.approx(wanted_ms, rel=0.01)


def test_no_time_is_no_time() -> None:
    """For measuring everything but the engine."""
    assert ZERO.seconds(8_192, 1.0, True) == 0.0


class Timed:
    """An engine on a clock that jumps, and when each request's tokens came."""

    def __init__(self) -> None:
        self.clock = SkippingClock()
        self.engine = SimEngine(SimSettings(), self.clock)
        self.times: dict[str, list[float]] = {}
        self.steps: dict[str, list[Step]] = {}
        self.open = 0
        self.started = False

    def submit(self, name: str, prompt: list[int], answer: int) -> None:
        """Send a request and note when its tokens come."""
        times = self.times[name] = []
        steps = self.steps[name] = []
        self.open += 1

        def emit(step: Step) -> None:
            times.append(self.clock.monotonic_s())
            steps.append(step)
            self.open -= bool(step.finish)

        request = GenerateRequest(name, "e", 1, pack_tokens(prompt), Sampling(answer, ignore_eos=True))
        self.engine.submit(request, emit)

    async def run(self, *, last: bool = True) -> None:
        """Until every request has ended."""
        if not self.started:
            self.started = True
            await self.engine.start()
        while self.open:
            await settle()
        if last:
            await self.engine.stop()


@pytest.mark.parametrize(("tokens", "wanted_ms"), TTFT_MS)
async def test_the_engine_takes_that_time_for_a_prompt(tokens: int, wanted_ms: float) -> None:
    """The scheduler's chunks and the share of blocks in use are those of the model."""
    timed = Timed()
    timed.submit("a", list(range(tokens)), 1)
    await timed.run()
    assert timed.times["a"][0] * 1000 == pytest.approx(wanted_ms, rel=0.01)
    assert [step.finish for step in timed.steps["a"]] == ["length"]


@pytest.mark.parametrize(("requests", "wanted_ms"), ITL_MS)
async def test_tokens_follow_each_other_as_in_the_peers_replay(requests: int, wanted_ms: float) -> None:
    """The more of the cache is in use, the longer a step takes."""
    timed = Timed()
    for number in range(requests):
        timed.submit(f"r{number}", [number] * 1_000, 500)
    await timed.run()
    gaps = [(later - earlier) * 1000 for times in timed.times.values() for earlier, later in pairwise(times)]
    assert len(gaps) == requests * 499
    assert median(gaps) == pytest.approx(wanted_ms, rel=0.03)


async def test_a_cached_prompt_costs_its_last_block_only() -> None:
    """The second request with the same prompt computes 16 tokens instead of 8,000."""
    timed = Timed()
    timed.submit("a", list(range(8_000)), 1)
    await timed.run(last=False)
    began_s = timed.clock.monotonic_s()
    timed.submit("b", list(range(8_000)), 1)
    await timed.run()
    assert [timed.steps[name][0].cached_tokens for name in "ab"] == [0, 8_000 - 16]
    wanted_s = StepTime().seconds(16, 500 / 16_384, True)
    assert timed.times["b"][0] - began_s == pytest.approx(wanted_s, rel=0.01)
