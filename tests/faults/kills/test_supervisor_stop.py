"""The stop of a service manager: each process of the fleet gets SIGTERM at once, and again from its parent."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.faults.answers import Answer, client_of, settle
from tests.support.processes.fleet import descendants, fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

STREAMS = 6


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)])
async def test_a_service_managers_stop_cuts_no_stream(tmp_path: Path, number: signal.Signals) -> None:
    """Streams that run end with the answer of an undisturbed run; then everything has ended."""
    async with fleet(tmp_path, "--engine", "sim", "--workers", "2") as up, client_of(up.url) as client:
        answers = [Answer(seed, 200).start(client) for seed in range(STREAMS)]
        while not all(one.text for one in answers):
            await asyncio.sleep(0.01)
        # In the order in which a control group lists them; the NATS server of `up` is one of them.
        for pid in sorted([up.process.pid, *descendants(up.process.pid)]):
            os.kill(pid, number)
        problems = await settle(answers, stalled_s=60)
        assert not problems, "\n".join(problems)
        async with asyncio.timeout(60):
            assert await up.process.wait() == 0
