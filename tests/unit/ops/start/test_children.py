"""Which process a fleet may lose: its workers, as long as it serves, and nothing else."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from headwater.actors.runtime import actor
from headwater.actors.runtime.actor import RestartPolicy, Unrecoverable
from headwater.ops.start.children import ChildGroup
from tests.support.worlds.clock import ManualClock

POLICY = RestartPolicy(
    restarts_max=3, window_s=100.0, delay_s=1.0, delay_s_max=2.0, steady_s=20.0, kept_delay_s=9.0
)


class FakeChild:
    """A process that ends after `lasts_s`, each time, or runs until it is stopped."""

    def __init__(
        self, clock: ManualClock, name: str, end: Callable[[], str] | None = None, lasts_s: float = 1.0
    ) -> None:
        self._lasts_s = lasts_s
        self.name = name
        self.pid = 1
        self.lives = 0
        self.runs_for_s = 0.0
        self._clock = clock
        self._end = end
        self._stopped = asyncio.Event()

    async def run(self) -> str:
        """One life."""
        self.lives += 1
        if self._end is None:
            await self._stopped.wait()
            return ""
        await self._clock.sleep(self._lasts_s)
        return self._end()

    async def stop(self) -> None:
        """End it."""
        self._stopped.set()


def fails() -> str:
    return "exit code 1"


def cannot_start() -> str:
    raise Unrecoverable("its file is gone")


def fails_to_start() -> str:
    raise actor.StartFailed("CUDA out of memory")


@asynccontextmanager
async def group(clock: ManualClock):  # type: ignore[no-untyped-def]
    made = ChildGroup(clock, POLICY)
    yield made
    await made.stop()


async def test_worker_that_fails_for_ever_does_not_end_a_fleet_that_was_ready() -> None:
    """Not even if there is no other: it comes back, at most every nine seconds once it failed too often."""
    clock = ManualClock()
    async with group(clock) as children:
        worker = FakeChild(clock, "worker-0", fails)
        children.add(worker, is_worker=True)
        children.was_ready = True
        with capture_logs() as lines:
            await clock.advance(60.0)
        often = [line for line in lines if line["event"] == "child_restart_limit_exceeded"]
        assert often[0]["delay_s"] == POLICY.kept_delay_s
        assert "worker-0 failed 4 times" in often[0]["reason"]
        assert 8 <= worker.lives <= 11
        assert not children.failure.done()


@pytest.mark.parametrize(("steady_s", "ends"), [(0.0, True), (POLICY.steady_s, False)])
async def test_before_that_only_another_worker_that_runs_steadily_keeps_the_fleet(
    steady_s: float, ends: bool
) -> None:
    clock = ManualClock()
    async with group(clock) as children:
        other = FakeChild(clock, "worker-1")
        other.runs_for_s = steady_s
        children.add(other, is_worker=True)
        children.add(FakeChild(clock, "worker-0", fails), is_worker=True)
        await clock.advance(60.0)
        assert children.failure.done() == ends


async def test_other_processes_and_the_last_worker_that_cannot_start_end_the_fleet() -> None:
    clock = ManualClock()
    async with group(clock) as children:
        children.was_ready = True
        children.add(FakeChild(clock, "worker-0", cannot_start), is_worker=True)
        children.add(FakeChild(clock, "worker-1"), is_worker=True)
        await clock.advance(5.0)
        assert not children.failure.done(), "the other worker serves"
        children.add(FakeChild(clock, "router", fails))
        await clock.advance(60.0)
        assert children.failure.result().startswith("router failed 4 times")
    async with group(clock) as children:
        children.was_ready = True
        children.add(FakeChild(clock, "worker-0", cannot_start), is_worker=True)
        await clock.advance(5.0)
        assert children.failure.result() == "worker-0: its file is gone"


async def test_a_worker_whose_starts_fail_is_started_again_for_ever_once_the_fleet_was_ready() -> None:
    """Each takes as long as a load of a model; the pauses between them grow all the same, up to the longest."""
    clock = ManualClock()
    async with group(clock) as children:
        worker = FakeChild(clock, "worker-0", fails_to_start, lasts_s=POLICY.steady_s + 8.0)
        children.add(worker, is_worker=True)
        children.was_ready = True
        with capture_logs() as lines:
            await clock.advance(1_000.0)
        assert not children.failure.done()
        again = [line for line in lines if line["event"] == "child_restarting"]
        delays = [line["delay_s"] for line in again]
        assert delays == sorted(delays)
        assert (delays[0], delays[-1]) == (POLICY.delay_s, POLICY.kept_delay_s)
        assert {line["reason"] for line in again} == {"CUDA out of memory"}
        assert not [line for line in lines if line["event"] == "process_abandoned"]
        assert worker.lives > 20


async def test_a_fleet_that_was_never_ready_ends_with_why_its_worker_does_not_start() -> None:
    """After a few tries: whoever started it waits for it."""
    clock = ManualClock()
    async with group(clock) as children:
        worker = FakeChild(clock, "worker-0", fails_to_start, lasts_s=POLICY.steady_s + 8.0)
        children.add(worker, is_worker=True)
        await clock.advance(150.0)
        assert "CUDA out of memory" in children.failure.result()
        assert worker.lives <= 4


async def test_stages_end_what_they_name() -> None:
    """And the rest last; a worker that was given up is not waited for."""
    clock = ManualClock()
    children = ChildGroup(clock, POLICY)
    made = {name: FakeChild(clock, name) for name in ("nats-server", "edge", "worker-0")}
    for name, child in made.items():
        children.add(child, is_worker=name == "worker-0")  # type: ignore[arg-type]
    await clock.advance(1.0)
    for stage, gone in (("edge", "edge"), ("", "worker-0"), (None, "nats-server")):
        await (children.stop_workers() if stage == "" else children.stop(*([stage] if stage else [])))
        assert [name for name, child in made.items() if child._stopped.is_set()].count(gone) == 1
        assert sum(child._stopped.is_set() for child in made.values()) == {"edge": 1, "": 2, None: 3}[stage]
