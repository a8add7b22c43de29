"""An edge that starts after the workers serves answers that outlive many renewals of the workers' leases."""

import asyncio
from pathlib import Path

import pytest

from headwater.actors.runtime.lease import RENEW_S, TTL_S
from tests.faults.answers import Answer, client_of, settle, succeeds, under_way
from tests.support.processes.fleet import fleet
from tests.support.processes.restarted import kept_edge, until_healthy

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TOKENS = 1200
RENEWALS = 5
"""An answer lasts at least so many renewals of a lease, or the test shows nothing."""


@pytest.mark.soak
async def test_an_edge_started_after_the_workers_serves_long_answers(tmp_path: Path) -> None:
    """The next life of a killed edge, and a second edge, stream long answers to their ends, streaming or not."""
    async with (
        fleet(tmp_path, "--engine", "sim") as up,
        client_of(up.url) as client,
        kept_edge(tmp_path, up.nats, "edge-late") as (_, late_url),
        client_of(late_url) as late,
    ):
        await until_healthy(late_url, workers=2)
        before = up.kill(" edge ")
        async with asyncio.timeout(60):
            while up.pids("--name edge-0") in ([], [before]):
                await asyncio.sleep(0.05)
        await until_healthy(up.url, workers=2)
        answers = [Answer(0, TOKENS).start(one) for one in (client, client, late, late)]
        unary = asyncio.create_task(succeeds(client, tokens=TOKENS))
        await under_way(answers)
        problems = await settle(answers, stalled_s=60)
        assert not problems, "\n".join(problems)
        assert await unary == ""
        assert min(answer.lasted_s for answer in answers) >= max(RENEWALS * RENEW_S, TTL_S)
        # Nothing migrated: nobody was lost.
        for log in (up.log, tmp_path / "edge-late.log"):
            assert "request_migrated" not in log.read_text()
