"""Coding agents, as npm and PyPI install them, complete a task of ten turns on a fleet."""

from pathlib import Path

import pytest

from tests.agents import task
from tests.agents.agents import AGENTS, AIDER, Agent
from tests.agents.stage import Stage, stage

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(400)]

each_agent = pytest.mark.parametrize("agent", AGENTS, ids=[one.name for one in AGENTS])


async def work_through(on: Stage, agent: Agent) -> None:
    """Have the agent do its task, and check that it did."""
    if agent.calls is None:
        text = await on.run(*agent.task[:-1], messages=task.MESSAGES)
    else:
        text = await on.run(*agent.task, task.PROMPT)
    on.check(text)


@each_agent
async def test_an_agent_completes_a_task(tmp_path: Path, agent: Agent) -> None:
    """It reads, runs, mends and runs again: each request is valid, and the program is right at the end."""
    answers = task.script(agent.calls) if agent.calls else task.edits()
    async with stage(tmp_path, agent.models, answers) as on:
        await work_through(on, agent)
        # A turn for each command but the first two, which are in one, and the last answer.
        turns = task.EDIT_TURNS if agent is AIDER else len(task.COMMANDS)
        streamed = [one for one in on.recorder.generated if one.body.get("stream")]
        assert len(streamed) >= turns, on.recorder.summary()
        assert await on.metric("headwater_edge_requests_total") >= 10
        assert not await on.metric("headwater_edge_http_errors_total")
