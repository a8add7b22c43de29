"""The short forms of `tests.faults.store.quorum_loss`."""

from pathlib import Path

import pytest

from tests.faults.store.quorum_loss import Meanwhile, quorum_loss

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SECONDS = 8.0
"""Longer than a lease, and than any request to the log is waited for."""


@pytest.mark.parametrize(
    ("meanwhile", "survivor_leads"),
    [
        ("a worker joins", True),
        pytest.param("nothing", True, marks=pytest.mark.soak),
        # It was killed when the quorum was lost.
        pytest.param("a router restarts", True, marks=pytest.mark.soak),
        # Prompts that are being computed at one worker go on at another one.
        pytest.param("a hand-off is open", True, marks=pytest.mark.soak),
        # No stream has a leader then: what is asked of the log is not answered at all.
        pytest.param("nothing", False, marks=pytest.mark.soak),
    ],
)
async def test_tokens_flow_while_the_log_has_no_quorum(
    tmp_path: Path, meanwhile: Meanwhile, survivor_leads: bool
) -> None:
    """Every stream ends right, whatever else happens when the quorum is lost, and whether the third server led any stream."""
    report = await quorum_loss(
        tmp_path, meanwhile=meanwhile, outage_s=SECONDS, streams=4, survivor_leads=survivor_leads
    )
    report.check()
