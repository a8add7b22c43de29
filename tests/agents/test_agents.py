"""Codex and Claude Code, as npm installs them, complete a task of ten turns on a fleet."""

import asyncio
import subprocess
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import msgspec
import pytest

from tests.agents import task
from tests.agents.agents import AGENTS, Agent, environment
from tests.clients import model
from tests.support.engines import scripted
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(400)]

CONTEXT = 400_000
"""The model has a token for each byte, and Claude Code's first prompt 115,000."""


@pytest.mark.parametrize("agent", AGENTS, ids=[one.name for one in AGENTS])
async def test_an_agent_completes_a_task(tmp_path: Path, agent: Agent) -> None:
    """It reads, runs, mends and runs again: each request is valid, and the program is right at the end."""
    work, home, answers = tmp_path / "work", tmp_path / "home", tmp_path / "answers.json"
    task.write(work)
    await asyncio.to_thread(subprocess.run, ["git", "init", "--quiet"], cwd=work, check=True)
    answers.write_bytes(msgspec.json.encode(task.script(agent.call)))
    made = model.make(tmp_path / "model", context=CONTEXT)
    flags: tuple[str, ...] = (
        "--engine",
        "sim",
        "--model",
        str(made),
        "--sim-step-time",
        "zero",
        "--sim-blocks",
        "100000",
    )
    flags += ("--workers", "1", "--model-aliases", agent.model, "--record-payloads", "full")
    async with fleet(tmp_path, *flags, program=scripted.program(answers)) as up:
        process = await asyncio.create_subprocess_exec(
            *agent.command,
            cwd=work,
            env=environment(home, up.url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
        )
        async with asyncio.timeout(300):
            output, _ = await process.communicate()
        text = output.decode(errors="replace")
        assert process.returncode == 0, text[-3000:]
        assert task.DONE in text, text[-3000:]
        assert (work / "add.py").read_text() == task.MENDED
        async with up.client() as client:
            metrics = (await client.get("/metrics")).text
    ended = [line for line in metrics.splitlines() if line.startswith("headwater_edge_requests_total{")]
    # A turn for each command but the first two, which are in one, and the last answer.
    assert sum(float(line.rpartition(" ")[2]) for line in ended) >= len(task.COMMANDS), ended
    refused = [line for line in metrics.splitlines() if line.startswith("headwater_edge_http_errors_total{")]
    assert not refused, refused
