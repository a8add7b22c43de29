"""The debugger's commands as a user runs them, against a fleet of real processes."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from headwater.ops.debug.top import ENTER, LEAVE
from headwater.ops.start.children import child_environment
from tests.support.processes.fleet import FleetProcess, fleet, stream_text
from tests.tidy.source import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """Two simulated workers that have answered a few requests."""
    async with fleet(tmp_path_factory.mktemp("fleet"), "--engine", "sim", "--workers", "2") as made:
        async with made.client() as client:
            for number in range(3):
                question = f"Where does river {number} begin? " * 4
                body = {"model": "sim", "max_tokens": 70, "messages": [{"role": "user", "content": question}]}
                await stream_text(client, body)
        yield made


@pytest.mark.soak
async def test_top_on_a_terminal_leaves_it_as_it_was(up: FleetProcess) -> None:
    """It shows the workers until Ctrl-C."""
    controller, terminal = pty.openpty()
    environment = child_environment() | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headwater.ops.cli", "top", "--nats", up.nats),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=terminal,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    os.close(terminal)
    os.set_blocking(controller, False)
    shown = b""
    async with asyncio.timeout(60):
        while shown.count(b"worker-1") < 2:
            shown += _read(controller)
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    shown += _read(controller)
    os.close(controller)
    assert shown.decode().startswith(ENTER)
    assert shown.decode().endswith(LEAVE)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


async def test_a_request_on_a_paused_worker_is_stuck_until_it_resumes(
    up: FleetProcess, tmp_path: Path
) -> None:
    """It is told with what it waits for, and that remedy helps. A capture tells it as of when it was made."""
    body = {
        "model": "sim",
        "max_tokens": 600,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Which river is the longest?"}],
    }
    chunks: list[int] = []
    async with up.client() as client:
        asked = asyncio.create_task(stream_text(client, body, chunks.append))
        async with asyncio.timeout(30):
            while not chunks:
                await asyncio.sleep(0.01)
        for worker in ("worker-0", "worker-1"):
            assert (await up.command("ctl", worker, "pause", "--mode", "keep"))[0] == 0
        async with asyncio.timeout(30):
            while (await up.command("stuck", "--quiet", "1.5"))[0] == 0:
                await asyncio.sleep(0.1)
        code, shown = await up.command("stuck", "--quiet", "1.5")
        assert code == 1
        capture = str(tmp_path / "stuck.hwc")
        assert (await up.command("capture", "--around", "-1s", "--output", capture))[0] == 0
        assert ": waits for further tokens of worker-" in shown
        remedy = shown[shown.index("remedy: headwater ") :].splitlines()[0].split()[2:]
        assert remedy[0] == "ctl"
        assert remedy[2] == "resume"
        assert (await up.command(*remedy))[0] == 0
        _, finish, _ = await asked
        assert finish == "length"
        for worker in ("worker-0", "worker-1"):
            await up.command("ctl", worker, "resume")
    assert (await up.command("stuck", "--quiet", "0"))[0] == 0
    code, shown = await up.command("stuck", "--quiet", "0.3", "--file", capture)
    assert code == 1, shown
    # Nothing more comes in a capture: these end.
    code, shown = await up.command("tail", "--from", "-1m", "--kind", "fleet", "--file", capture)
    assert code == 0
    assert "fleet.controlled" in shown
    code, shown = await up.command("top", "--json", "--file", capture)
    assert [one["state"] for one in msgspec.json.decode(shown)["workers"]] == ["paused", "paused"]
    condition = 'worker("worker-0").state == "paused" and workers.paused == 2'
    code, shown = await up.command("bisect", "--when", condition, "--file", capture)
    assert code == 0, shown
    code, shown = await up.command(
        "export", "--perfetto", "--output", str(tmp_path / "t.json"), "--file", capture
    )
    assert code == 0
    assert ", 1 open ones; " in shown
