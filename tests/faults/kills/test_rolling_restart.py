"""The short form of `tests.faults.kills.rolling_restart`."""

from pathlib import Path

import pytest

from tests.faults.kills.rolling_restart import rolling_restart

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


async def test_a_rolling_restart_of_everything_fails_no_request(tmp_path: Path) -> None:
    """Workers, routers, edges and the server, one after the other, under requests and under streams."""
    report = await rolling_restart(tmp_path, requests=200, answer_s=3.0, concurrency=4, pause_s=0.1)
    report.check()
