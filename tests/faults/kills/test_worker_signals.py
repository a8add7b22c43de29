"""The short form of `tests.faults.kills.worker_signals`; `tests/sim` has each signal in each state in virtual time."""

from pathlib import Path

import pytest

from tests.faults.kills.worker_signals import worker_signals

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.soak
async def test_no_request_hangs_or_fails_while_workers_are_signalled(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGTERM, SIGKILL and SIGSTOP, each at least once: every request gets the answer of an undisturbed run."""
    report = await worker_signals(
        tmp_path, requests=150, seed=request.config.getoption("randomly_seed"), clients=8, pause_s=(0.2, 0.5)
    )
    report.check()
