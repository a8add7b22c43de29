"""Recorded runs: production actors on virtual time write the logs, and what-if runs them again and says how far it was."""

import asyncio
import random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from headwater.engines.sim import StepTime
from headwater.engines.sim.scheduler import MediaSpan
from headwater.events.memory import MemoryLog
from headwater.events.ports import Entry
from headwater.ops.bench.trace import hashes_of
from headwater.ops.config.setting import ConfigError
from headwater.ops.sim import loop
from headwater.ops.sim import run as sim_run
from headwater.ops.sim.clients import Clients
from headwater.ops.sim.fleet import POOL, SETTINGS, SimFleet, names
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.run import Tracer
from headwater.ops.whatif.recording import Expected, Recording, RequestResult, Samples, fitted, recording
from headwater.ops.whatif.report import EstimateError, as_text, estimate_errors, fidelity
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import (
    BlocksStored,
    Event,
    LoadReported,
    MediaPlace,
    RequestAccepted,
    RequestEnded,
    RequestRouted,
    RequestStarted,
    Role,
)
from headwater.schemas.hashing import chain_plain, pack_hashes
from headwater.schemas.routing import Candidate, Constraints, Decision, Preferences, Weights
from headwater.schemas.subjects import pool_subject, request_subject
from tests.support.data.examples import joined
from tests.support.worlds.clock import ManualClock

REQUESTS = 150


async def recorded_run(fleet: SimFleet, clients: Clients, requests: int) -> Recording:
    """A fleet and its clients, without faults, to the end; then their logs."""
    for name in fleet.names:
        fleet.start(name)
    await clients.run(requests, 3.0, 40.0)
    await asyncio.sleep(2.0)
    await fleet.stop()
    found = await recording(POOL, fleet.store.pool(POOL), fleet.store.requests)
    for name in fleet.names:
        await fleet.kill(name)
    return found


def fleet_of(clock: VirtualLoop, engines: int, roles: tuple[Role, ...] = (), **more: Any) -> SimFleet:
    """Engines, a router and an edge."""
    kinds = (names("engine", engines), names("router", 1), names("edge", 1))
    return SimFleet(clock, random.Random(1), Tracer(clock, show=False), *kinds, roles, **more)


@pytest.mark.parametrize("roles", [(), ("prefill", "prefill", "decode", "both")])
def test_the_simulator_comes_close_to_a_fleet_of_production_actors(roles: tuple[Role, ...]) -> None:
    """From the logs alone: workers, roles, prompts, step times. Hits and ends within 5 %, first tokens but for messages."""
    sim_run.quiet(trace=False)

    async def run_fleet(clock: VirtualLoop) -> Recording:
        fleet = fleet_of(clock, 4, roles)
        return await recorded_run(fleet, Clients(clock, fleet, random.Random(2)), REQUESTS)

    recorded = loop.run(run_fleet)
    setup = recorded.setup
    assert (setup.workers, setup.prefill_workers, setup.decode_workers) == ((1, 2, 1) if roles else (4, 0, 0))
    assert (setup.blocks, setup.block_size) == (SETTINGS.total_blocks, SETTINGS.block_size)
    assert (recorded.whole, recorded.partly, recorded.unknown) == (REQUESTS, 0, 0)
    # Read off what workers measured: 0.05 ms a token and 20 ms, 30 ms for a token (the log takes a moment, too).
    assert recorded.fitted
    assert setup.step_time.prefill_ms == pytest.approx((0.0, 0.05, 20.0), abs=2.0)
    assert setup.step_time.seconds(0, 0.2, True) == pytest.approx(0.030, rel=0.1)
    found = fidelity(recorded, run(recorded.trace, setup))
    assert found.compared > 0.8 * REQUESTS
    assert found.left_out == 0
    hits, ttft, e2e = found.gaps
    assert hits.recorded_mean > 1
    assert abs(hits.off) < 0.05
    # The simulated network takes milliseconds for each message, twice as many where legs are apart; what-if has none.
    assert abs(ttft.off) < (0.15 if roles else 0.10)
    assert abs(e2e.off) < 0.05
    assert "hit blocks" in as_text(found)
    # The router had no times for the first prompts. Of the rest it expects the prefill, not the rest of the step that is running,
    # nor the decode leg's first step.
    told, itl, whole = found.estimates
    assert [one.measure for one in found.estimates] == ["TTFT", "ITL", "E2E"]
    assert REQUESTS // 2 < told.requests < REQUESTS
    step_ms = 1000 * setup.step_time.seconds(0, 0.2, True)
    assert 0 < told.was_mean - told.estimated_mean < (3 if roles else 1) * step_ms
    assert told.error == pytest.approx(told.was_mean - told.estimated_mean, rel=0.1)
    # Clients choose limits that the simulated engine uses up, so that E2E is known once ITL is.
    assert itl.error < 0.1 * itl.was_mean
    assert whole.error < 0.5 * whole.constant_error
    assert "mean absolute error" in as_text(found)


class Written(NamedTuple):
    """A pool log and a request log."""

    pool: MemoryLog
    requests: MemoryLog


def test_images_are_read_from_the_logs() -> None:
    """Each where it was, and the encode worker with them; first tokens come within a tenth of when they came."""
    sim_run.quiet(trace=False)

    async def run_fleet(clock: VirtualLoop) -> Recording:
        settings = SETTINGS._replace(embedding_tokens=Setup(embeddings_mib=1).embedding_tokens)
        fleet = fleet_of(clock, 2, settings=settings, encoders=["encode-0"])
        clients = Clients(clock, fleet, random.Random(2), images=random.Random(3))
        return await recorded_run(fleet, clients, 60)

    recorded = loop.run(run_fleet)
    setup = recorded.setup
    assert (setup.workers, setup.encode_workers, setup.blocks) == (2, 1, SETTINGS.total_blocks)
    assert recorded.left_out == 0
    with_images = [one for one in recorded.trace.requests if one.media]
    assert 5 < len(with_images) < 30
    for one in with_images:
        assert all(image.tokens in (4, 9, 25) for image in one.media)
        assert one.media[-1].start + one.media[-1].tokens < one.prompt_tokens
    times = setup.step_time._replace(encode_ms=SETTINGS.step_time.encode_ms)
    ran = run(recorded.trace, msgspec.structs.replace(setup, step_time=times, embeddings_mib=1))
    assert ran.encoding.legs > 10
    _, ttft, e2e = fidelity(recorded, ran).gaps
    assert abs(ttft.off) < 0.15
    assert abs(e2e.off) < 0.05


async def written(*events: Event) -> Written:
    """These events, each as a message of a writer of its own, in the log it belongs to."""
    logs = Written(MemoryLog(ManualClock()), MemoryLog(ManualClock()))
    for number, event in enumerate(events):
        batch: Batch[Any] = Batch(SCHEMA_VERSION, f"writer-{number}", 1, 1, 0, (event,))
        of_request = type(event).__name__.startswith("Request")
        log = logs.requests if of_request else logs.pool
        subject = (
            request_subject("ns", f"writer-{number}")
            if of_request
            else pool_subject("ns", "p", "kv", f"writer-{number}")
        )
        await log.append(Entry(subject, seal(batch)))
    return logs


def asked(number: int, prompt: list[int], *, deepest: int = 0, tokens: int = 0) -> list[Event]:
    """Decision and life of a request with these blocks of 16 tokens, of which `deepest` were matched."""
    name = f"c-{number}"
    decision = Decision(
        number=number,
        position=1,
        seen=number - 1,
        wall_ns=number * 1_000_000,
        request=f"{name}-0-1",
        prompt_tokens=tokens or len(prompt) * 16,
        max_tokens=9,
        blocks=len(prompt),
        deepest=prompt[deepest - 1] if deepest else 0,
        following=prompt[deepest] if deepest < len(prompt) else 0,
        last=prompt[-1],
        constraints=Constraints(),
        preferences=Preferences("kv", 0.0),
        weights=Weights(),
        seed=1,
        worker="w1",
        epoch=1,
        candidates=(Candidate("w1", 1, deepest, 0, 0, 0, 0, 1.0),),
    )
    return [
        decision,
        RequestAccepted(name, "m", "chat", decision.prompt_tokens, 9, True),
        RequestRouted(name, 0, decision.request, "w1", 1, 0),
        RequestStarted(name, 0, "w1", 1, deepest * 16, 10.0),
        RequestEnded(name, "length", 9, deepest * 16, 0, 10.0, 50.0),
    ]


def stored(parent: int, hashes: list[int]) -> BlocksStored:
    """An announcement."""
    return BlocksStored(parent, pack_hashes(np.array(hashes, np.uint64)))


async def test_prompts_are_walked_back_from_their_last_block() -> None:
    """Whole where it was announced, else as far as it was matched, and what nobody announced is nobody else's."""
    tokens = list(range(96))
    one, other = chain_plain(tokens, 16, 0), chain_plain([7] * 96, 16, 0)
    longer = chain_plain([*tokens, *range(500, 532)], 16, 0)
    lost = chain_plain([9] * 64, 16, 0)
    logs = await written(
        joined("w1", 1),
        stored(0, one[:4]),
        stored(one[3], one[4:]),
        # Its beginning was purged from the log.
        stored(lost[1], lost[2:]),
        *asked(1, one, tokens=100),
        *asked(2, longer, deepest=6),
        *asked(3, other),
        *asked(4, lost),
        *asked(5, longer, deepest=6)[:1],
    )
    found = await recording("p", logs.pool, logs.requests)
    assert (found.whole, found.partly, found.unknown, found.left_out) == (1, 1, 2, 1)
    first, second, third, fourth = found.trace.requests
    assert first.ids[:6] == tuple(one)
    assert (len(first.ids), len(hashes_of(first, 16))) == (7, 6)
    assert second.ids[:7] == (*one, longer[6])
    assert len(second.ids) == len(longer)
    assert not set(third.ids) & set(fourth.ids) & {*one, *other, *lost}
    assert [request.arrival_ns for request in found.trace.requests] == [0, 1_000_000, 2_000_000, 3_000_000]
    assert found.results["c-2-0-1"].hit_blocks == 6


async def test_media_of_every_kind_are_read_from_the_log() -> None:
    media = (MediaPlace("video", "v", 3, 20), MediaPlace("audio", "a", 30, 2))
    image = (MediaPlace("image", "i", 4, 6),)
    first, second = (asked(number, chain_plain([number] * 32, 16, 0)) for number in (1, 2))
    first[1] = RequestAccepted("c-1", "m", "chat", 32, 9, True, media=media)
    second[1] = RequestAccepted("c-2", "m", "chat", 32, 9, True, media=image)
    logs = await written(joined("w1", 1), *first, *second)
    requests = (await recording("p", logs.pool, logs.requests)).trace.requests
    assert [one.media for one in requests] == [
        (MediaSpan("v", 3, 20, "video"), MediaSpan("a", 30, 2, "audio")),
        (MediaSpan("i", 4, 6, "image"),),
    ]


async def test_estimates_are_compared_from_the_arrival_on() -> None:
    """The wait in the router's queue is known when it decides: it is part of TTFT and E2E. A single token has no ITL."""
    estimated = Candidate("w1", 1, 0, 0, 0, 0, 0, 1.0, queue_ms=2.0, prefill_ms=4.0, itl_ms=6.0)
    decision, *life, ended = asked(1, chain_plain([1] * 32, 16, 0))
    assert isinstance(decision, Decision)
    changed = {"candidates": (estimated,), "waited_ms": 3, "output_tokens": 11}
    events = [joined("w1", 1), msgspec.structs.replace(decision, **changed), *life]
    logs = await written(*events, ended)
    [one] = (await recording("p", logs.pool, logs.requests)).results.values()
    # 9 tokens took 50 ms, the first of them 10 ms.
    assert (one.itl_ms, one.expected) == (5.0, Expected(3 + 6, 6.0, 3 + 6 + 10 * 6))
    logs = await written(*events, RequestEnded("c-1", "length", 1, 0, 0, 10.0, 10.0))
    [one] = (await recording("p", logs.pool, logs.requests)).results.values()
    assert one.itl_ms == -1.0


def test_the_best_constant_is_the_median() -> None:
    """An estimate of a measure that was not taken, or a measure that was not estimated, is left out."""
    results = [
        RequestResult(0, ttft, 100.0, 5.0, Expected(ttft + 2, -1.0, 90.0)) for ttft in (10.0, 20.0, 60.0)
    ] + [RequestResult(0, 30.0, 500.0, -1.0, Expected(-1.0, 7.0, 90.0))]
    ttft, whole = estimate_errors(results)
    assert ttft == EstimateError("TTFT", 3, 32.0, 30.0, 2.0, ttft.constant_error)
    assert ttft.constant_error == pytest.approx((10 + 0 + 40) / 3)
    assert (whole.measure, whole.requests, whole.error, whole.constant_error) == ("E2E", 3, 10.0, 0.0)


async def test_a_log_with_nothing_to_run_again_says_so() -> None:
    """No decision, or none that led to an answer."""
    logs = await written(joined("w1", 1))
    with pytest.raises(ConfigError, match="has no decision"):
        await recording("p", logs.pool, logs.requests)
    logs = await written(joined("w1", 1), *asked(1, chain_plain([1] * 32, 16, 0))[:2])
    with pytest.raises(ConfigError, match="led to an answer"):
        await recording("p", logs.pool, logs.requests)


def test_step_times_are_found_again_among_slower_ones() -> None:
    """A curve for prompts, a line for tokens; gaps in which prompts were computed are not taken for steps."""
    draw = random.Random(3)
    true = StepTime((2e-6, 0.02, 15.0), (0.0, 30.0, 6.0))
    samples = Samples()
    for _ in range(400):
        used, tokens = draw.random(), draw.randrange(50, 8_000)
        step_ms = true.seconds(0, used, True) * 1e3 * draw.choice((1, 1, 1, 2, 3))
        prefill_us = true.seconds(tokens, 0.5, True) * 1e6
        report = LoadReported(
            1,
            0,
            round(used * 1_000),
            1_000,
            prefills=((tokens, round(prefill_us)),),
            step_us=round(step_ms * 1e3),
        )
        samples.take(report)
    found = fitted(samples)
    assert found is not None
    for tokens in (100, 1_000, 8_000):
        wanted = true.seconds(tokens, 0.5, True)
        assert found.seconds(tokens, 0.5, True) == pytest.approx(wanted, rel=0.15)
    for used in (0.2, 0.9):
        assert found.seconds(0, used, True) == pytest.approx(true.seconds(0, used, True), rel=0.15)
    assert fitted(Samples()) is None
