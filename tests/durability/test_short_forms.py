"""The short form of every run of this folder; the long ones are commands."""

from pathlib import Path

import pytest

from tests.durability.burst import burst
from tests.durability.kill_rounds import kill_rounds
from tests.durability.leader_kills import leader_kills
from tests.durability.zombie import zombies


async def test_killed_server_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """SIGKILL under four writers at full speed: everything acknowledged is stored, once and in order."""
    report = await kill_rounds(tmp_path, rounds=5, events=30_000)
    report.check()


@pytest.mark.soak
async def test_killed_leader_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """The stream's leader of three servers dies: nothing is lost, and nothing stays pending."""
    report = await leader_kills(tmp_path, kills=1, rate=2_000, period_s=2.0)
    report.check()


async def test_burst_into_a_slow_reader_is_whole_or_declared_gone(tmp_path: Path) -> None:
    """Far more than the reader's window at once: nothing is passed over in silence, and memory stays bounded."""
    report, gone = await burst(
        tmp_path, events=30_000, pause_s=0.002, limit_bytes=512 * 1024, limited_pause_s=0.05
    )
    report.check()
    assert gone, "the limit was never met: this run showed nothing"


@pytest.mark.processes
async def test_zombie_appends_nothing_behind_the_next_life(tmp_path: Path) -> None:
    """Two engine processes stand still for longer than a lease, until others write, and go on in mid-sentence."""
    report, late = await zombies(tmp_path, waves=5, workers=2, leases=1, until_late=True)
    report.check()
    assert late, "no zombie tried to write: this run showed nothing"
