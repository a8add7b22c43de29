"""The short form of `tests.faults.kills.pauses`."""

from pathlib import Path

import pytest

from headwater.actors.runtime.lease import TTL_S
from tests.faults.kills.pauses import pauses

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(240)]

SECONDS = 4.0


async def test_a_paused_process_costs_no_stream_and_serves_soon_after(tmp_path: Path) -> None:
    """Each stands still for longer than its lease: streams end right, and new requests are served in time."""
    assert SECONDS > TTL_S
    report = await pauses(tmp_path, seconds=SECONDS)
    report.check()
