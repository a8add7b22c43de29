"""What follows the death of an engine, and which silence is one: idle, busy, paused, stopped."""

import asyncio
from typing import Any

import pytest

from headwater.actors.worker.control import send_command
from headwater.actors.worker.incarnation import FAILURE_NOTICE_S_MAX
from headwater.router.state import RouterState
from headwater.schemas.control import ControlRequest
from headwater.schemas.events import BlocksStored, WorkerLeft
from headwater.schemas.inference import Accepted, Embedded, Refused
from tests.support.data.examples import packed
from tests.support.worlds.control import ready
from tests.support.worlds.health import QUICK, dies, lease_of
from tests.support.worlds.virtual import Stage, events_of, staged, until


@staged
async def test_a_dead_engine_is_gone_from_everywhere_at_once(stage: Stage) -> None:
    """Found by its own check: its requests are given up, the lease is given back, and the log hears why."""
    worker = await ready(stage, health=QUICK)
    await worker.given(1)
    worker.engine.dead = "its process was killed by SIGKILL"
    assert await dies(stage, worker, 3.0) < 1.2
    left = events_of(await stage.records(), WorkerLeft)
    assert [one.reason for one in left] == ["EngineDied: its process was killed by SIGKILL"]
    assert left[0].epoch == worker.actor.epoch
    entry = worker.actor.intake.frames.status("r1-0-1", 0).entry
    assert entry is not None
    assert entry.finish == "died"
    state = RouterState()
    for one in await stage.records():
        state.apply(one)
    assert state.loads.workers == {}
    await asyncio.sleep(10.0)
    assert await lease_of(stage) is None, "nobody takes it again"


@staged
async def test_a_dead_engine_is_gone_even_if_the_log_can_not_be_reached(stage: Stage) -> None:
    """It waits for the log a moment, not longer; the lease goes first."""
    worker = await ready(stage, health=QUICK)
    append = stage.pool.append

    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    stage.pool.append = never  # type: ignore[method-assign]
    worker.engine.dead = "gone"
    await until(lambda: worker.actor.status.failure_reason)
    await asyncio.sleep(0.1)
    assert await lease_of(stage) is None
    assert await dies(stage, worker, 5.0) < FAILURE_NOTICE_S_MAX + 0.5
    stage.pool.append = append  # type: ignore[method-assign]


@staged
async def test_a_dead_engine_ends_its_worker_even_if_nothing_can_be_reached(stage: Stage) -> None:
    """The lease lapses then; the process does not stay to see it."""
    worker = await ready(stage, health=QUICK)
    stage.fleet.processes["w1"].cut()
    worker.engine.dead = "gone"
    assert await until(lambda: worker.ended is not None, 20.0) < 1.2 + FAILURE_NOTICE_S_MAX + 1.0
    await asyncio.sleep(5.0)
    assert await lease_of(stage) is None


@staged
async def test_an_idle_engine_that_hangs_is_found(stage: Stage) -> None:
    """It says that it is well and answers nothing: one probe without an answer is enough."""
    worker = await ready(stage, health=QUICK)
    worker.engine.hang()
    took = await dies(stage, worker, 60.0)
    assert 10.0 <= took <= 10.0 + 4.0 + 3.0
    [left] = events_of(await stage.records(), WorkerLeft)
    assert "did not answer a request of one token within 4 s (health probe)" in left.reason


@staged
async def test_two_failed_probes_are_a_death_and_one_is_not(stage: Stage) -> None:
    """Engines fail a single request for many reasons."""
    worker = await ready(stage, health=QUICK)
    worker.engine.broken = "a bit fell over"
    await until(lambda: len(worker.engine.asked) == 2, 15.0)
    worker.engine.broken = ""
    await asyncio.sleep(30.0)
    assert worker.ended is None
    worker.engine.broken = "again"
    await dies(stage, worker, 20.0)
    assert worker.ended is not None
    assert "failed a request of one token: again" in worker.ended


@staged
async def test_a_busy_engine_is_not_probed_and_a_stuck_one_is_found(stage: Stage) -> None:
    """As long as tokens come there is nothing to ask; when none come for long, it is over."""
    worker = await ready(stage, health=QUICK)
    for number in range(1, 60):
        # One always runs.
        assert isinstance(await worker.given(number, 60), Accepted)
        await asyncio.sleep(0.5)
    assert len([one for one in worker.engine.asked if one.request.startswith("canary")]) == 1
    assert isinstance(await worker.given(99, 400), Accepted)
    worker.engine.hang()
    took = await dies(stage, worker, 100.0)
    assert 59.0 <= took <= 63.0
    assert worker.ended is not None
    assert "no token and no block for 60 s with" in worker.ended


@staged
async def test_an_engine_that_fills_blocks_is_not_stuck(stage: Stage) -> None:
    """A long prompt on a slow machine: no token for longer than the limit, and a block now and then."""
    worker = await ready(stage, health=QUICK)
    assert isinstance(await worker.given(1, 400), Accepted)
    worker.engine.hang()
    for number in range(4):
        await asyncio.sleep(40.0)
        worker.engine.announce([BlocksStored(0, packed(number + 1))])
    assert worker.ended is None
    assert 19.0 <= await dies(stage, worker, 100.0) <= 63.0


@staged
async def test_an_engine_that_pools_for_long_is_not_probed(stage: Stage) -> None:
    """One batch of prompts may take longer than a probe may wait behind it."""
    worker = await ready(stage, health=QUICK)
    worker.engine.embed_s = 50.0
    asked = len(worker.engine.asked)
    reply = await worker.pooled("e1")
    assert isinstance(reply, Embedded)
    assert len(worker.engine.asked) == asked
    assert worker.ended is None


@pytest.mark.parametrize("state", ["pause", "sleep"])
@staged
async def test_who_is_paused_or_asleep_is_not_probed(stage: Stage, state: Any) -> None:
    """It owes nobody an answer; behind it the probes go on."""
    worker = await ready(stage, health=QUICK)
    assert (await worker.told(state)).status == 200
    asked = len(worker.engine.asked)
    await asyncio.sleep(120.0)
    assert len(worker.engine.asked) == asked
    assert worker.ended is None
    assert (await worker.told("resume" if state == "pause" else "wake")).status == 200
    await asyncio.sleep(15.0)
    assert len(worker.engine.asked) > asked


@staged
async def test_a_probe_makes_way_for_a_command(stage: Stage) -> None:
    """Sleep comes while a probe is in the engine: it is aborted, and nothing runs when the engine sleeps."""
    worker = await ready(stage, health=QUICK)
    worker.engine.hang()
    await until(lambda: worker.actor.health.probing, 15.0)
    began = stage.clock.time()
    assert (await worker.told("sleep")).status == 200
    assert stage.clock.time() - began < 1.0
    assert worker.engine.asleep == 1


@staged
async def test_a_process_that_stood_still_does_not_blame_its_engine(stage: Stage) -> None:
    """Stopped in the middle of a probe for longer than a probe may take: that is no time the engine had."""
    worker = await ready(stage, health=QUICK)
    process = stage.fleet.processes["w1"]
    worker.engine.hang()
    await until(lambda: worker.actor.health.probing, 15.0)
    process.group.pause()
    await asyncio.sleep(60.0)
    process.group.resume(stage.clock)
    await asyncio.sleep(2.0)
    worker.engine.stopping.go.set()
    await asyncio.sleep(30.0)
    assert worker.ended is None
    assert (await send_command(worker.asks, "w1", ControlRequest("status"))).detail == "ready"


@staged
async def test_a_falling_worker_takes_nothing_more(stage: Stage) -> None:
    """Between its engine's death and its own end an edge may still ask."""
    worker = await ready(stage, health=QUICK)
    worker.actor.status.failure_reason = "worker w1 failed: x"
    assert await worker.given(1) == Refused("worker w1 failed: x", True, gone=True)


@staged
async def test_a_worker_refuses_as_soon_as_a_request_shows_that_its_engine_is_dead(stage: Stage) -> None:
    """Its own check comes up to half a second later: until then edges would send it their requests again and again."""
    worker = await ready(stage, health=QUICK)
    worker.engine.dies_of = "the core was killed"
    assert isinstance(await worker.given(1), Accepted)
    await until(lambda: worker.actor.status.engine_death)
    refused = await worker.given(2)
    assert isinstance(refused, Refused)
    assert (refused.retryable, refused.gone) == (True, True)
    assert "the core was killed" in refused.reason
    assert await dies(stage, worker, 3.0) < 0.5


@staged
async def test_a_worker_whose_engine_does_not_take_a_request_because_it_is_dead_ends(stage: Stage) -> None:
    """The request was the first to notice: it is answered, and the worker does not wait for its own check."""
    worker = await ready(stage, health=QUICK)
    worker.engine.dead = "the core was killed"
    refused = await worker.given(1)
    assert isinstance(refused, Refused)
    assert (refused.retryable, refused.gone) == (True, True)
    assert await dies(stage, worker, 3.0) < 0.5
