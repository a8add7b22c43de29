"""Each known fault of TensorRT-LLM, as its double has it, and the guard against it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from headwater.engines.conformance.case import Answer, EngineCase, KvFold
from headwater.engines.engine import EngineDied, EngineUnavailable, Transfer
from headwater.engines.model_files import NO_FILES
from headwater.engines.sim import ZERO, StepTime
from headwater.engines.tensorrt_llm import TensorRtOptions, polling
from headwater.engines.tensorrt_llm import engine as engine_module
from headwater.engines.tensorrt_llm.engine import TensorRtEngine
from headwater.schemas.events import BlocksCleared, KvGap
from tests.support.engines.settings import engine_settings
from tests.support.ports.waiting import eventually
from tests.support.tensorrt_llm.double import World, installed
from tests.support.worlds.clock import ManualClock

pytestmark = pytest.mark.timeout(60)

TRANSFER_S = 1.0
OVERRIDES: dict[str, Any] = {
    "max_seq_len": 2048,
    "cache_transceiver_config": {
        "backend": "DEFAULT",
        "max_tokens_in_buffer": 2048,
        "kv_transfer_timeout_ms": round(1000 * TRANSFER_S),
    },
}


@pytest.fixture
def world() -> Iterator[World]:
    """The double, on a clock that the test moves."""
    with installed(World(ManualClock(), ZERO)) as made:
        yield made
        made.faults.hangs_health.clear()
        made.faults.hangs_shutdown = False


@asynccontextmanager
async def running(world: World, **overrides: Any) -> AsyncIterator[EngineCase]:
    """An engine, started on the moved clock."""
    options, files = (
        TensorRtOptions(overrides={**OVERRIDES, **overrides}),
        NO_FILES._replace(eos_token_ids=(2,)),
    )
    settings = engine_settings(options, files=files)
    made = TensorRtEngine(settings, world.clock)
    start = asyncio.ensure_future(made.start())
    while not start.done():
        await advance(world, 0.1)
    case = EngineCase(made, start.result())
    try:
        yield case
    finally:
        await made.stop()


async def advance(world: World, seconds: float) -> None:
    assert isinstance(world.clock, ManualClock)
    await world.clock.advance(seconds)


async def ended(world: World, *answers: Answer, within_s: float = 20.0) -> None:
    """Move the clock until all have ended."""
    passed = 0.0
    while not all(answer.finish for answer in answers):
        assert passed < within_s, [answer.finish for answer in answers]
        await advance(world, 0.1)
        passed += 0.1


async def dies(case: EngineCase, match: str) -> None:
    with pytest.raises(EngineDied, match=match):
        await case.engine.check()


async def test_decode_leg_whose_kv_never_comes_ends_with_an_error(world: World) -> None:
    """12542, 12540: blocks evicted before the send. And where nothing else runs, the engine is restarted."""
    async with running(world) as first, running(world) as second:
        prompt = first.prompt(1.5)
        prefill = first.submit(first.request(prompt, leg="prefill"))
        await ended(world, prefill)
        pinned = prefill.steps[-1].pinned
        assert pinned is not None
        assert pinned.lease_s < TRANSFER_S
        world.faults.kv_never_arrives = True
        decode = second.submit(second.request(prompt, leg="decode"), Transfer(pinned.params))
        await advance(world, 0.9 * TRANSFER_S)
        assert not decode.steps
        await ended(world, decode)
        assert decode.finish == "error"
        assert "did not arrive within 1 s" in decode.steps[-1].detail
        await dies(second, "1 decode legs wait for KV that never came")


async def test_abort_of_a_decode_leg_waits_for_its_kv(world: World) -> None:
    """The client has its end at once; TensorRT-LLM is told only once the transfer is over."""
    async with running(world) as first, running(world) as second:
        prompt = first.prompt(1.5)
        prefill = first.submit(first.request(prompt, leg="prefill"))
        await ended(world, prefill)
        pinned = prefill.steps[-1].pinned
        assert pinned is not None
        request = second.request(prompt, leg="decode", max_tokens=1000)
        decode = second.submit(request, Transfer(pinned.params))
        await asyncio.sleep(0)
        second.engine.abort(request.request)
        await ended(world, decode)
        assert (decode.finish, decode.tokens) == ("abort", [])
        while second.engine.load().running:
            await advance(world, 0.01)
        assert world.faults.aborts
        assert set(world.faults.aborts) == {("generation_only", True)}


async def test_no_more_requests_are_submitted_than_there_are_slots(world: World) -> None:
    """18742, 18983: with one more than it has slots for, the double never moves it."""
    async with running(world, max_batch_size=2) as case:
        answers = [case.submit(case.request(case.prompt(0.5), max_tokens=20)) for _ in range(7)]
        await asyncio.sleep(0)
        assert case.engine.load()[:2] in ((0, 7), (2, 5))
        await ended(world, *answers)
        assert [len(answer.tokens) for answer in answers] == [20] * 7


async def test_lost_blocks_end_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """12313: after many cancelled hand-offs the pool stays full, and health is good. Not while a transfer may run."""
    monkeypatch.setattr(engine_module, "LEAK_MARGIN_S", 2.0)
    async with running(world) as case:
        world.faults.leaks = True
        await advance(world, 0.5)
        await case.engine.check()
        await advance(world, TRANSFER_S + 1)
        await case.engine.check()
        await advance(world, engine_module.LEAK_MARGIN_S)
        await dies(case, "KV blocks are in use without any request")


async def test_dead_rank_is_reported_with_its_first_cause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "PERIOD_S", 0.01)
    world.step_time = StepTime()
    async with running(world) as case:
        await case.engine.check()
        answer = case.submit(case.request(case.prompt(1), max_tokens=1000))
        await advance(world, 0.1)
        assert answer.tokens
        world.faults.dead = "CUDA error: an illegal memory access"
        watcher = case.engine._watchdog  # type: ignore[attr-defined]
        await eventually(lambda: bool(watcher.verdict))
        await dies(case, "illegal memory access")
        assert answer.finish == "died"
        assert "illegal memory access" in answer.steps[-1].detail


async def test_health_check_that_blocks_is_noticed_from_outside(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12640, 15363: a call to a dead rank blocks its thread, not the loop; stalls of ten seconds are endured."""
    assert polling.ANSWER_S_MAX > 10
    monkeypatch.setattr(polling, "ANSWER_S_MAX", 3.0)
    monkeypatch.setattr(polling, "PERIOD_S", 0.01)
    async with running(world) as case:
        world.faults.hangs_health.set()
        watcher = case.engine._watchdog  # type: ignore[attr-defined]
        # Each question that is answered is over by now; the one that is asked next is not.
        await asyncio.sleep(0.1)
        await eventually(lambda: watcher._asked_s is not None)
        await advance(world, 2.0)
        await case.engine.check()
        await advance(world, 2.0)
        await dies(case, "has not answered a health check")


async def test_error_while_an_output_is_awaited_is_the_engines_death(world: World) -> None:
    async with running(world) as case:
        world.faults.iteration = RuntimeError("executor ended")
        answers = [case.submit(case.request(case.prompt(1))) for _ in range(2)]
        with capture_logs() as lines:
            await ended(world, *answers)
        assert [answer.finish for answer in answers] == ["died"] * 2
        # The engine of the test before may still be shutting down in its thread, and say so.
        assert [line["event"] for line in lines].count("engine_died") == 1
        await dies(case, "executor ended")


async def test_statistics_that_fail_are_the_engines_death(world: World) -> None:
    """A poller that ended in silence would leave a router with an old load."""
    async with running(world) as case:
        world.faults.stats = OSError("socket closed")
        await advance(world, 1.0)
        await dies(case, "statistics cannot be read: OSError: socket closed")


async def test_lost_events_are_a_gap(world: World) -> None:
    """From its bounded buffer: nothing of before counts any more, and what comes after does."""
    async with running(world) as case:
        lost, found = KvFold(), []

        async def read() -> None:
            async for events in case.engine.kv_events():
                found.extend(events)

        reader = asyncio.ensure_future(read())
        for drop in (0, 1, 0):
            world.faults.loses_events = drop
            prompt = case.prompt(2.5)
            answer = case.submit(case.request(prompt, max_tokens=2))
            await ended(world, answer)
            await advance(world, 0.2)
        reader.cancel()
        kinds = [type(event) for event in found]
        at = kinds.index(KvGap)
        assert kinds[at + 1] is BlocksCleared
        assert len(case.engine.held_blocks()) >= 2
        assert not lost.events


async def test_shutdown_that_hangs_does_not_hang_the_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "STOP_S_MAX", 0.1)
    async with running(world) as case:
        world.faults.hangs_shutdown = True
        with capture_logs() as lines:
            await case.engine.stop()
        assert [line["event"] for line in lines] == ["engine_stop_timed_out"]
        world.faults.hangs_shutdown = False


async def test_canary_passes_all_others_and_salts_are_given(world: World) -> None:
    """What no edge sent has the highest priority; the others ours, turned round."""
    async with running(world) as case:
        given: list[dict[str, Any]] = []
        llm = case.engine._llm  # type: ignore[attr-defined]
        submit = llm.generate_async

        def spy(*positional: Any, **named: Any) -> Any:
            given.append(named)
            return submit(*positional, **named)

        llm.generate_async = spy
        from msgspec.structs import replace

        usual = case.request(case.prompt(1), salt="tenant")
        requests = (
            replace(usual, request="canary-1", edge=""),
            usual,
            replace(usual, request="low", priority=50),
        )
        answers = [case.submit(request) for request in requests]
        await ended(world, *answers)
        assert [one["priority"] for one in given] == [1.0, 0.5, 0.25]
        assert {one["cache_salt"] for one in given} == {"tenant"}


def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(EngineUnavailable, match=r"`trtllm` extra on Python 3\.12 .*this is 3\.1"):
        asyncio.run(TensorRtEngine(engine_settings(TensorRtOptions()), ManualClock()).start())
