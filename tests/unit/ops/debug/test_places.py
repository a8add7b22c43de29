"""Places in a pool's log: positions, times, bookmarks."""

import pytest

from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import find_position, open_log
from tests.support.worlds.told_fleet import clock_of, told_fleet


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
