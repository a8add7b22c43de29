"""The short form of every run of this folder; the long ones are commands."""

from pathlib import Path

from tests.durability.kill_rounds import kill_rounds
from tests.durability.leader_kills import leader_kills


async def test_killed_server_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """SIGKILL under four writers at full speed: everything acknowledged is stored, once and in order."""
    report = await kill_rounds(tmp_path, rounds=5, events=30_000)
    assert not report.violations, report.text()


async def test_killed_leader_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """The stream's leader of three servers dies: nothing is lost, and nothing stays pending."""
    report = await leader_kills(tmp_path, kills=1, rate=2_000, period_s=2.0)
    assert not report.violations, report.text()
