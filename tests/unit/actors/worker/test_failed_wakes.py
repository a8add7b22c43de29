"""An engine that does not come back from its sleep is dead: its worker ends, and a new one starts. Nothing sleeps for ever."""

import asyncio
from collections.abc import Callable

import pytest

from headwater.actors.worker.control_commands import ENGINE_S_MAX
from headwater.schemas.events import WorkerLeft
from headwater.schemas.inference import Accepted
from tests.support.engines.controlled import ControlledSim
from tests.support.worlds.control import Worker, ready
from tests.support.worlds.health import QUICK, dies
from tests.support.worlds.virtual import Stage, events_of, staged

ENDED_S = 5.0
"""After the failure: the command is answered, and the worker ends."""


def fail(engine: ControlledSim) -> None:
    engine.fails.add("wake")


def break_down(engine: ControlledSim) -> None:
    engine.broken = "CUDA error: an illegal memory access"


def hang(engine: ControlledSim) -> None:
    engine.hang()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("how", "reason", "within_s"),
    [
        (fail, "no wake today", ENDED_S),
        (break_down, "illegal memory access", ENDED_S),
        (hang, "", ENGINE_S_MAX + ENDED_S),
    ],
)
@staged
async def test_a_wake_that_fails_ends_the_worker(
    stage: Stage, how: Callable[[ControlledSim], None], reason: str, within_s: float, level: int
) -> None:
    """It raises, the woken engine fails its first request, or answers none. Who asked is told, and the log."""
    worker = await ready(stage, health=QUICK)
    assert (await worker.told("sleep", level=level)).status == 200
    how(worker.engine)
    waking = asyncio.ensure_future(worker.told("wake"))
    await dies(stage, worker, within_s)
    [left] = events_of(await stage.records(), WorkerLeft)
    assert "wake" in left.reason
    assert reason in left.reason
    waking.cancel()


@staged
async def test_who_asks_for_a_wake_that_fails_is_told_before_the_worker_ends(stage: Stage) -> None:
    worker = await ready(stage, health=QUICK)
    assert (await worker.told("sleep")).status == 200
    fail(worker.engine)
    reply = await worker.told("wake")
    assert (reply.status, "no wake today" in reply.detail) == (502, True)
    await dies(stage, worker, ENDED_S)


async def refused_to_sleep(stage: Stage) -> Worker:
    """A worker whose engine failed to sleep."""
    worker = await ready(stage, health=QUICK)
    worker.engine.fails.add("sleep 1")
    assert (await worker.told("sleep")).status == 502
    return worker


@staged
async def test_a_worker_that_could_not_fall_asleep_serves_on(stage: Stage) -> None:
    """Kept blocks are a reason for it: the engine is as before, and says so by an answer."""
    worker = await refused_to_sleep(stage)
    assert isinstance(await worker.given(1, 2), Accepted)
    await asyncio.sleep(30.0)
    assert worker.ended is None


@staged
async def test_an_engine_that_was_left_half_asleep_is_dead(stage: Stage) -> None:
    """It failed to sleep, and to answer after that: nobody else would ask it before the next request."""

    class HalfAsleep(ControlledSim):
        async def sleep(self, level: int) -> None:
            """See `Engine.sleep`."""
            break_down(self)
            await super().sleep(level)

    worker = await ready(stage, health=QUICK, make=HalfAsleep)
    worker.engine.fails.add("sleep 1")
    await worker.told("sleep")
    assert not isinstance(await worker.given(1, 2), Accepted)
    await dies(stage, worker, ENDED_S)
