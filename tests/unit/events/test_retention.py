"""A snapshot is due before the log forgets what the newest one needs."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.events.ports import LogUnavailable, Retention
from headwater.events.snapshot_store import (
    CHECK_PERIOD_S,
    HEAVY,
    MARGIN,
    RetentionGuard,
    forgotten,
    snapshot_due,
)
from tests.support.worlds.clock import ManualClock

GIB = 1024**3
DAY_S = 86_400.0

ROOMY = Retention(1, 1000, 1_000_000, 8 * GIB, 0, DAY_S, 30.0)


@pytest.mark.parametrize(
    ("held", "saved", "due"),
    [
        (ROOMY, 900, ""),
        (ROOMY, 1000, ""),
        (ROOMY, 0, ""),
        (Retention(1, 0, 0, 8 * GIB, 0, DAY_S, 0.0), 0, ""),
        # An idle log whose messages are all gone: the snapshot at its end has everything.
        (Retention(1001, 1000, 0, 8 * GIB, 0, DAY_S, 0.0), 1000, ""),
        (Retention(1001, 1000, 0, 8 * GIB, 0, DAY_S, 0.0), 999, "starts at 1001"),
        (ROOMY._replace(first=902), 900, "starts at 902"),
        (ROOMY._replace(first=901), 900, ""),
        (ROOMY._replace(next_age_s=DAY_S / 2), 900, "position 901 is 43200 s old"),
        (ROOMY._replace(next_age_s=DAY_S / 2 - 1), 900, ""),
        (ROOMY._replace(next_age_s=DAY_S / 2), 1000, ""),
        (ROOMY._replace(max_age_s=0.0, next_age_s=9e9), 900, ""),
        (ROOMY._replace(max_messages=200), 900, "100 messages"),
        (ROOMY._replace(max_messages=201), 900, ""),
        # A full log of 1,000 messages: an eighth of them may weigh half of it.
        (ROOMY._replace(max_bytes=1_000_000), 876, ""),
        (ROOMY._replace(max_bytes=1_000_000), 875, "up to 500000 bytes"),
        # Half empty: nothing can be cut, however much is behind the snapshot.
        (ROOMY._replace(max_bytes=2_000_001), 0, ""),
        (ROOMY._replace(max_bytes=0, bytes=99 * GIB), 0, ""),
    ],
)
def test_due_when_the_message_behind_the_snapshot_is_near_a_limit(
    held: Retention, saved: int, due: str
) -> None:
    """By age, by bytes, by number, or because it is gone; never while nothing is behind the snapshot."""
    reason = snapshot_due(held, saved)
    assert due in reason
    assert bool(reason) == bool(due)


@given(st.lists(st.integers(1, HEAVY), max_size=400), st.integers(10 * HEAVY, 200), st.data())
def test_looking_often_enough_nothing_is_ever_forgotten(
    sizes: list[int], max_bytes: int, data: st.DataObject
) -> None:
    """Messages up to `HEAVY` times the smallest, a look before each half of the limit is written: always in time."""
    log: deque[int] = deque()
    first, last, saved, unseen = 1, 0, 0, 0
    room = int((1 - MARGIN) * max_bytes) - HEAVY
    for size in sizes:
        if unseen + size > room or data.draw(st.booleans()):
            held = Retention(first, last, sum(log), max_bytes, 0, 0.0, 0.0)
            if snapshot_due(held, saved):
                saved = last
            unseen = 0
        log.append(size)
        last, unseen = last + 1, unseen + size
        while sum(log) > max_bytes:
            log.popleft()
            first += 1
        assert forgotten(first, last, saved) == ""


@pytest.mark.parametrize(
    ("first", "last", "saved", "why"),
    [
        (1, 10, 0, ""),
        (1, 0, 0, ""),
        (6, 10, 5, ""),
        (11, 10, 10, ""),
        (7, 10, 5, "the log starts at 7 and the newest snapshot is at 5"),
        (2, 10, 0, "there is no snapshot"),
        (1, 3, 5, "it was replaced"),
    ],
)
def test_a_log_that_goes_on_from_its_snapshot_or_not(first: int, last: int, saved: int, why: str) -> None:
    """The guard's judgement, with the cause."""
    assert why in forgotten(first, last, saved)
    assert bool(forgotten(first, last, saved)) == bool(why)


class Held:
    """A log with a settable retention, that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.held = ROOMY
        self.gone = False

    async def retention(self, after: int) -> Retention:
        """See `Log.retention`."""
        self.asked.append(after)
        if self.gone:
            raise LogUnavailable("no answer")
        return self.held


async def test_the_guard_asks_now_and_then_and_survives_a_lost_server() -> None:
    """Called each second it looks every five; an unreachable log is no reason for a snapshot."""
    log, clock = Held(), ManualClock()
    guard = RetentionGuard(log, clock)
    for _ in range(int(2 * CHECK_PERIOD_S)):
        assert await guard.due(900) == ""
        await clock.advance(1.0)
    assert log.asked == [900, 900]
    log.gone = True
    assert await guard.due(901) == ""
    log.gone, log.held = False, ROOMY._replace(first=999)
    assert await guard.due(901) == ""
    await clock.advance(CHECK_PERIOD_S)
    assert "starts at 999" in await guard.due(901)
    assert log.asked == [900, 900, 901, 901]
