"""Places in a pool's log: positions, times, bookmarks."""

import pytest

from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import find_position, open_log
from headwater.ops.terminal import iso_time, time_ns
from tests.support.worlds.clock import WALL_NS
from tests.support.worlds.told_fleet import clock_of, told_fleet

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "before_s"),
    [
        ("-5m", 300),
        ("-1.5s", 1.5),
        ("-2h", 7200),
        ("-1d", 86400),
        ("2027-01-15T08:00:00", 0),
        ("2027-01-15T07:59:59.5Z", 0.5),
        ("2027-01-15T09:00:00+01:00", 0),
        ("2027-01-14", 86400 + 8 * 3600),
        ("7:59", 60),
        ("07:59:30", 30),
    ],
)
def test_times(text: str, before_s: float) -> None:
    assert time_ns(text, WALL_NS) == WALL_NS - round(before_s * SECOND)


@pytest.mark.parametrize("text", ["5", "20270115", "-5", "-5x", "5m", "yesterday", "25:00", ""])
def test_what_is_no_time(text: str) -> None:
    assert time_ns(text, WALL_NS) is None


def test_a_time_is_shown_as_it_is_read() -> None:
    assert iso_time(WALL_NS + 1_500_000) == "2027-01-15T08:00:00.001Z"
    assert time_ns(iso_time(WALL_NS), WALL_NS + SECOND) == WALL_NS


async def test_positions() -> None:
    told = await told_fleet()
    await told.join("w1")
    await clock_of(told).advance(60)
    await told.join("w2")
    log = await open_log(told.ports, "p")
    await SnapshotStore(told.ports.blobs, "p").bookmarks.put("incident", 3)
    await SnapshotStore(told.ports.blobs, "p").bookmarks.put("far", 9)
    wanted = {"start": 1, "end": 4, "2": 2, "0": 0, "-30s": 2, "-2h": 0, "incident": 3}
    assert {text: await find_position(text, log, "A") for text in wanted} == wanted
    for text, wrong in (
        ("5", "A 5: the log holds positions 1 to 4"),
        ("far", r"A far \(position 9\): the log holds positions 1 to 4"),
        ("x", r"A x: expected a position \(1234\), a time before now \(-5m\)"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            await find_position(text, log, "A")
