"""Restarting what dies: when, how often, and when it is given up."""

from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.runtime.actor import (
    Backoff,
    RestartLimitReached,
    RestartPolicy,
    Unrecoverable,
    supervise,
)
from tests.support.worlds.clock import ManualClock, SkippingClock, running

POLICY = RestartPolicy(restarts_max=4, window_s=100.0, delay_s=1.0, delay_s_max=5.0, steady_s=20.0)


def test_the_delay_doubles_up_to_its_bound_and_then_it_is_given_up() -> None:
    """At most `restarts_max` restarts within the window."""
    backoff = Backoff(POLICY)
    assert [backoff.next_delay_s(number, 0.0) for number in range(5)] == [1.0, 2.0, 4.0, 5.0, None]


def test_deaths_outside_the_window_are_forgotten() -> None:
    """A child that dies now and then is restarted for ever."""
    backoff = Backoff(POLICY)
    assert all(backoff.next_delay_s(number * 26.0, 0.0) is not None for number in range(100))
    assert backoff.next_delay_s(99 * 26.0, 0.0) is None, "one more within the window"


def test_having_run_steadily_resets_the_delay() -> None:
    """After a good while the first restart is quick again; after a short one it is not."""
    backoff = Backoff(POLICY)
    assert backoff.next_delay_s(0.0, 0.0) == 1.0
    assert backoff.next_delay_s(10.0, 19.9) == 2.0
    assert backoff.next_delay_s(40.0, 20.0) == 1.0
    assert backoff.next_delay_s(50.0, 0.0) == 2.0


@given(st.lists(st.floats(0.0, 60.0), max_size=60))
def test_no_window_ever_has_more_restarts_than_allowed(pauses: list[float]) -> None:
    """For any times of death, and every delay stays within its bounds."""
    backoff, now_s = Backoff(POLICY), 0.0
    restarts: list[float] = []
    for pause in pauses:
        now_s += pause
        delay = backoff.next_delay_s(now_s, pause)
        if delay is None:
            assert len([at for at in restarts if now_s - at <= POLICY.window_s]) >= POLICY.restarts_max
            return
        assert POLICY.delay_s <= delay <= POLICY.delay_s_max
        restarts.append(now_s)
        assert len([at for at in restarts if now_s - at <= POLICY.window_s]) <= POLICY.restarts_max


class Child:
    """Lives `life_s` and then ends as told: an exception is raised, a text returned."""

    def __init__(self, clock: ManualClock, *ends: str | Exception, life_s: float = 0.0) -> None:
        self.clock = clock
        self.ends = list(ends)
        self.life_s = life_s
        self.started_at_s: list[float] = []

    async def run(self) -> str:
        """One life."""
        self.started_at_s.append(self.clock.monotonic_s())
        if self.life_s:
            await self.clock.sleep(self.life_s)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


async def test_a_child_that_ends_with_a_reason_or_an_error_is_started_again() -> None:
    """Both count as deaths, and the waits between them are those of the policy; an empty reason is a stop."""
    clock = SkippingClock()
    child = Child(clock, "lease lost", ValueError("boom"), "again", "")
    await supervise("child", child.run, clock, POLICY)
    assert child.started_at_s == [0.0, 1.0, 3.0, 7.0]


@pytest.mark.parametrize(
    ("end", "reason"), [("lease lost", "lease lost"), (KeyError("x"), "KeyError: 'x'")], ids=["text", "error"]
)
async def test_giving_up_names_the_child_and_its_last_reason(end: str | Exception, reason: str) -> None:
    """Whoever reads the one line knows what died, how often, and why; a bare KeyError('x') would say nothing."""
    clock = SkippingClock()
    child = Child(clock, *["first"] * 4, end)
    with pytest.raises(RestartLimitReached, match=f"router r1 failed 5 times within 100 s, last: {reason}"):
        await supervise("router r1", child.run, clock, POLICY)
    assert len(child.started_at_s) == 5


async def test_a_hopeless_child_is_given_up_at_once() -> None:
    """An engine that is not installed will not be installed by trying again."""
    clock = SkippingClock()
    child = Child(clock, Unrecoverable("vLLM is not installed"))
    with pytest.raises(RestartLimitReached, match="worker w1: vLLM is not installed"):
        await supervise("worker w1", child.run, clock, POLICY)
    assert clock.slept == []


async def test_a_child_that_lives_long_is_restarted_for_ever() -> None:
    """Rare deaths are no reason to give up, and each restart is quick."""
    clock = SkippingClock()
    child = Child(clock, *["died"] * 50, "", life_s=30.0)
    await supervise("child", child.run, clock, POLICY)
    assert len(child.started_at_s) == 51
    assert clock.slept.count(1.0) == 50


async def test_cancelling_the_supervision_starts_nothing_more() -> None:
    """Neither while the child runs nor while a restart is waited for."""
    clock = ManualClock()
    child = Child(clock, "died", "died", "died", life_s=10.0)
    work: list[Callable[[], Awaitable[str]]] = [child.run]
    async with running(supervise("child", work[0], clock, POLICY)) as task:
        await clock.advance(10.5)
        assert child.started_at_s == [0.0]
        await clock.advance(1.0)
        assert child.started_at_s == [0.0, 11.0]
    assert task.cancelled()
    await clock.advance(100.0)
    assert len(child.started_at_s) == 2
