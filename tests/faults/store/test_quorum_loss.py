"""The short forms of `tests.faults.store.quorum_loss`."""

from pathlib import Path

import pytest

from tests.faults.store.quorum_loss import Meanwhile, quorum_loss

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SECONDS = 8.0
"""Longer than a lease, and than any request to the log is waited for."""


async def test_tokens_flow_while_the_log_has_no_quorum(tmp_path: Path) -> None:
    """Every stream ends right, although a worker was about to join when the quorum was lost."""
    report = await quorum_loss(tmp_path, meanwhile=("a worker joins",), outage_s=SECONDS, streams=4)
    print(report.text())
    assert not report.violations, report.text()


@pytest.mark.soak
@pytest.mark.parametrize("meanwhile", ["nothing", "a router restarts"])
async def test_what_else_may_happen_meanwhile(tmp_path: Path, meanwhile: Meanwhile) -> None:
    """The same with nothing beside it, and with a router that was killed when the quorum was lost."""
    report = await quorum_loss(tmp_path, meanwhile=(meanwhile,), outage_s=SECONDS, streams=6)
    print(report.text())
    assert not report.violations, report.text()


@pytest.mark.soak
async def test_an_open_handoff_survives_the_loss_of_the_quorum(tmp_path: Path) -> None:
    """Prompts that are being computed at one worker go on at another one, and running answers are not touched."""
    report = await quorum_loss(tmp_path, meanwhile=("a hand-off is open",), outage_s=SECONDS, streams=4)
    print(report.text())
    assert not report.violations, report.text()


@pytest.mark.soak
async def test_tokens_flow_where_the_third_server_led_nothing(tmp_path: Path) -> None:
    """No stream has a leader then: what is asked of the log is not answered at all."""
    report = await quorum_loss(tmp_path, outage_s=SECONDS, streams=4, survivor_leads=False)
    print(report.text())
    assert not report.violations, report.text()
