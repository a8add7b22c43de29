"""What a worker measures of its engine: stretches by hand, and a simulated engine whose step times are known."""

import asyncio
import random

import msgspec
import numpy as np
import pytest

from headwater.actors.runtime.ports import Message
from headwater.actors.worker.inflight import Progress, WorkerStatus
from headwater.actors.worker.lora import LoraGate
from headwater.actors.worker.prefill_timer import SAMPLES_MAX, PrefillMeasurements, PrefillTimer
from headwater.actors.worker.requests import RequestIntake
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.sim import StepTime
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import Cancel, GenerateRequest, Leg, Sampling
from tests.support.worlds.virtual import Stage, staged, until

QUIET = (1, 0)
"""An engine that has room: one more runs, nothing waits."""


class Hands:
    """A clock moved by hand, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.tokens = 0
        self.clock = PrefillTimer(lambda: self.now_ms / 1000)

    def at(self, ms: float) -> PrefillTimer:
        """Go to a time."""
        self.now_ms = ms
        return self.clock

    def first(self, ms: float, request: str, cached: int = 0) -> None:
        """A first token, in a step that brings it alone."""
        self.at(ms).record_first_tokens(request, cached)
        self.clock.record_step()
        self.tokens += 1

    def step(self, ms: float, tokens: int = 1) -> None:
        """Later tokens."""
        self.at(ms).record_step()
        self.tokens += tokens

    def taken(self) -> PrefillMeasurements:
        """What is reported a while later."""
        self.now_ms += 10
        return self.clock.take_measurements(self.tokens)


def test_a_prompt_on_an_idle_engine_takes_from_acceptance_to_its_first_token() -> None:
    """What was cached is not computed; nothing is told twice."""
    hands = Hands()
    hands.at(5).add_prompt("a", 1_000)
    hands.first(45, "a", cached=200)
    assert hands.taken() == PrefillMeasurements(((800, 40_000),), 0)
    assert hands.taken() == PrefillMeasurements()


def test_the_next_stretch_begins_where_the_last_one_ended() -> None:
    """First come, first served: a prompt that waited for another was not computed meanwhile."""
    hands = Hands()
    hands.at(0).add_prompt("a", 1_000)
    hands.at(1).add_prompt("b", 300)
    hands.first(40, "a")
    hands.first(60, "b")
    assert hands.taken().prefills == ((1_000, 40_000), (300, 20_000))


def test_first_tokens_that_come_together_are_one_sample() -> None:
    """From one step, though the adapter hands them over one by one."""
    hands = Hands()
    for at, name in ((0, "a"), (0, "b"), (1, "c")):
        hands.at(at).add_prompt(name, 100)
    hands.first(30, "a")
    hands.first(30.4, "b", cached=50)
    hands.first(50, "c")
    assert hands.taken().prefills == ((150, 30_000), (100, 20_000))


def test_a_group_is_not_told_before_it_is_whole() -> None:
    """A report may come between two first tokens of one step."""
    hands = Hands()
    hands.at(0).add_prompt("a", 100)
    hands.at(0).add_prompt("b", 100)
    hands.first(30, "a")
    assert hands.clock.take_measurements(hands.tokens) == PrefillMeasurements()
    hands.first(30.2, "b")
    assert hands.taken().prefills == ((200, 30_000),)


def test_a_prompt_begins_once_the_step_under_way_is_over() -> None:
    """Tokens of others that come meanwhile show where that is; those of its own last step do not."""
    hands = Hands()
    hands.at(0).add_prompt("d", 10)
    hands.first(20, "d")
    hands.at(25).add_prompt("a", 1_000)
    hands.step(40)
    hands.step(80)
    hands.first(80.2, "a")
    assert hands.taken().prefills == ((10, 20_000), (1_000, 40_200))
    hands.at(200).add_prompt("b", 500)
    hands.step(230)
    hands.first(230.1, "b")
    assert hands.taken().prefills == ((500, 30_100),), "its own step is the first that ends"


@pytest.mark.parametrize(
    ("accepted_ms", "expected"),
    [
        (10, ((14_000, 80_000),)),
        (29, ((14_000, 80_000),)),
        (31, ((9_000, 60_000), (5_000, 20_000))),
    ],
)
def test_a_prompt_that_was_there_when_the_last_step_began_joins_it(
    accepted_ms: float, expected: tuple[tuple[int, int], ...]
) -> None:
    """The first of two steps computes most of a, the second the rest of it, and of b what fits."""
    hands = Hands()
    hands.at(-100).add_prompt("d", 100)
    hands.first(-40, "d")
    hands.taken()
    hands.at(-10).add_prompt("a", 9_000)
    hands.step(0)
    early = accepted_ms < 30
    if early:
        hands.at(accepted_ms).add_prompt("b", 5_000)
    hands.step(30)
    if not early:
        hands.at(accepted_ms).add_prompt("b", 5_000)
    hands.first(60, "a")
    hands.first(80, "b")
    assert hands.taken().prefills == expected


def test_where_there_was_no_room_nothing_is_measured() -> None:
    """The next prompt waited for the end of another request; the one behind it may have begun with it."""
    hands = Hands()
    for at, name in enumerate(("d", "a", "b")):
        hands.at(at).add_prompt(name, 100)
    hands.first(20, "d")
    hands.at(5_000).end_request("d", 0, 2)
    hands.first(5_030, "a")
    hands.first(5_060, "b")
    hands.at(5_100).add_prompt("c", 100)
    hands.first(5_130, "c")
    assert hands.taken().prefills == ((100, 20_000), (100, 30_000))


def test_an_end_while_a_prompt_is_computed_changes_nothing() -> None:
    """Somebody waits, but behind the prompt that runs."""
    hands = Hands()
    hands.at(0).add_prompt("d", 100)
    hands.at(1).add_prompt("a", 100)
    hands.first(20, "d")
    hands.at(25).add_prompt("b", 100)
    hands.at(30).end_request("d", 1, 1)
    hands.first(50, "a")
    assert hands.taken().prefills == ((100, 20_000), (100, 30_000))


def test_a_prompt_that_is_given_up_spoils_the_stretch_and_no_other() -> None:
    """Part of it was computed in the time of the next one."""
    hands = Hands()
    for name in ("a", "b"):
        hands.at(0).add_prompt(name, 100)
    hands.at(20).end_request("a", *QUIET)
    hands.at(30).add_prompt("c", 100)
    hands.first(40, "b")
    hands.first(60, "c")
    assert hands.taken().prefills == ((100, 20_000),)


def test_what_is_unknown_ends_a_stretch_and_is_no_sample() -> None:
    """An engine that does not say what it had, and a prompt that waited for its adapter."""
    hands = Hands()
    hands.at(0).add_prompt("a", 100)
    hands.at(1).add_prompt("b", 100, is_measurable=False)
    hands.first(20, "a", cached=-1)
    hands.at(25).add_prompt("c", 100)
    hands.first(50, "b")
    hands.first(60, "c")
    hands.first(65, "fetched its KV")
    assert hands.taken().prefills == ((100, 10_000),)


def test_samples_are_bounded() -> None:
    """The newest are kept."""
    hands = Hands()
    for number in range(SAMPLES_MAX + 10):
        hands.at(number * 100).add_prompt(f"r{number}", number + 1)
        hands.first(number * 100 + 20, f"r{number}")
    told = hands.taken().prefills
    assert len(told) == SAMPLES_MAX
    assert told[-1] == (SAMPLES_MAX + 10, 20_000)


def test_the_mean_time_between_tokens_is_over_all_requests() -> None:
    """Whatever the moment of the report; an ended request waits for nothing."""
    hands = Hands()
    for name in ("a", "b"):
        hands.at(0).add_prompt(name, 100)
    hands.first(20, "a")
    hands.step(50)
    hands.first(80, "b")
    hands.step(80)
    hands.step(120, tokens=2)
    hands.at(120).end_request("b", *QUIET)
    told = hands.taken()
    assert (told.step_us, told.gaps) == ((30_000 + 30_000 + 2 * 40_000) // 4, 4)
    told = hands.taken()
    assert (told.step_us, told.gaps) == (0, 0)
    hands.step(180)
    assert hands.taken().step_us == 60_000


class Measuring:
    """An intake over a simulated engine, and everything that it reports."""

    def __init__(self, stage: Stage, settings: SimSettings) -> None:
        process, world = stage.world("w1")
        self.engine = SimEngine(settings, process)
        gate = LoraGate(self.engine, process.start)
        self.intake = RequestIntake(
            world, "w1", gate, process.start, WorkerStatus("w1", WorkerProfile(), asyncio.Event())
        )
        self.intake.begin_incarnation(1)
        process.start(self.intake.frames.run(), "frames")
        self.told: list[Progress] = []

    async def give(self, name: str, tokens: list[int], answer: int, leg: Leg = "") -> None:
        """A request arrives."""
        request = GenerateRequest(
            name, "e", 1, pack_tokens(tokens), Sampling(answer, ignore_eos=True), leg=leg
        )
        await self.intake.on_generate(Message("", msgspec.msgpack.encode(request), "_INBOX.nobody"))

    def take(self) -> None:
        """A report is made."""
        self.told.append(self.intake.inflight.take_progress())

    async def cancel(self, *names: str) -> None:
        """Nobody wants these any more, nor what they left for a decode leg."""
        await self.intake.on_cancel(Message("", msgspec.msgpack.encode(Cancel(names)), ""))

    @property
    def samples(self) -> list[tuple[int, int]]:
        """All that was measured."""
        return [sample for told in self.told for sample in told.prefills]


@pytest.mark.parametrize(("rate", "leg"), [(3.0, ""), (9.0, ""), (3.0, "prefill")])
@staged
async def test_the_step_time_of_a_simulated_engine_is_recovered(stage: Stage, rate: float, leg: Leg) -> None:
    """Its prefill polynomial, from what is reported beside requests that generate, within 10 %."""
    model = StepTime()
    measuring = Measuring(stage, SimSettings(step_time=model))
    await measuring.engine.start()
    draw = random.Random(7)
    clock = measuring.intake._ports.clock
    for number in range(300):
        # Some prompts share a beginning, which is cached from the second on.
        shared = [draw.randint(0, 3)] * (512 * draw.randint(0, 2))
        own = [1_000 + number] * draw.randint(50, 5_000)
        await measuring.give(f"r{number}", shared + own, draw.randint(1, 60), leg)
        await clock.sleep(draw.expovariate(rate))
        measuring.take()
        await measuring.cancel(*measuring.told[-1].finished)
    await until(lambda: not measuring.intake.inflight)
    await clock.sleep(1.0)
    measuring.take()
    told = measuring.told
    assert sum(len(one.prefilled) for one in told) == sum(len(one.cached) for one in told) == 300
    assert any(cached >= 512 for one in told for cached in one.cached)
    assert len(measuring.samples) > 100
    tokens, us = np.array(measuring.samples, np.float64).T
    fitted = np.polynomial.Polynomial.fit(tokens, us / 1000, 2).convert()
    for x in (200, 1_000, 3_000, 5_000):
        wanted_ms = model.seconds(x, 0.05, True) * 1000
        assert fitted(x) == pytest.approx(wanted_ms, rel=0.1), f"{x} prompt tokens"
    await measuring.engine.stop()


@staged
async def test_the_time_between_tokens_of_a_simulated_engine_is_recovered(stage: Stage) -> None:
    """Few requests, next to no cache in use: the constant of a decode step."""
    measuring = Measuring(stage, SimSettings())
    await measuring.engine.start()
    for name in ("a", "b"):
        await measuring.give(name, [1] * 32, 400)
    clock = measuring.intake._ports.clock
    await clock.sleep(0.5)
    measuring.take()
    steps = []
    for _ in range(8):
        await clock.sleep(0.1137)
        measuring.take()
        steps.append(measuring.told[-1].step_us)
    assert steps == pytest.approx([5_900] * 8, rel=0.05)
    await measuring.engine.stop()


@staged
async def test_a_cancelled_prompt_is_no_sample(stage: Stage) -> None:
    """Neither it nor what was computed beside it."""
    measuring = Measuring(stage, SimSettings())
    await measuring.engine.start()
    clock = measuring.intake._ports.clock
    await measuring.give("a", [1] * 30_000, 4)
    await measuring.give("b", [2] * 8_000, 4)
    await clock.sleep(0.4)
    await measuring.cancel("a")
    await until(lambda: not measuring.intake.inflight)
    await clock.sleep(0.1)
    await measuring.give("c", [3] * 1_000, 4)
    await until(lambda: not measuring.intake.inflight)
    await clock.sleep(0.1)
    measuring.take()
    assert [tokens for tokens, _ in measuring.samples] == [1_000]
    # Answers of b and c, each as long as it may be; a cancelled one tells nothing.
    assert [answer for told in measuring.told for answer in told.outputs] == [(4, 4), (4, 4)]
    await measuring.engine.stop()


def test_prompts_with_images_to_encode_are_measured_apart() -> None:
    """An image whose KV was cached took nothing; without any, it is a sample like others."""
    hands = Hands()
    hands.at(0).add_prompt("a", 300, images=[(120, 100), (260, 50)])
    hands.first(30, "a", cached=128)
    hands.at(60).add_prompt("b", 300, images=[(120, 100)])
    hands.first(70, "b", cached=128)
    hands.at(100).add_prompt("c", 300, images=[(120, 100), (260, 50)])
    hands.first(150, "c")
    found = hands.at(200).take_measurements(0)
    assert found.encodes == ((172, 1, 50, 30_000), (300, 2, 150, 50_000))
    assert found.prefills == ((172, 10_000),)
    assert hands.at(201).take_measurements(0).encodes == ()
