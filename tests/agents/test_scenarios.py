"""What happens to agents at work: commands that may not run, interruptions, full contexts, images, refusals of the fleet, a dead worker."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.agents import task
from tests.agents.agents import AGENTS, CLAUDE, PICTURE, Agent
from tests.agents.stage import WITHIN_S, end, stage
from tests.agents.test_agents import each_agent, work_through
from tests.support.engines.scripted import Answer

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(400)]

WITH_COMMANDS = [one for one in AGENTS if one.calls is not None]


@pytest.mark.parametrize("agent", WITH_COMMANDS, ids=[one.name for one in WITH_COMMANDS])
async def test_a_command_that_the_agent_refuses(tmp_path: Path, agent: Agent) -> None:
    """Without the flag that allows everything. The refusal is a result for the model, which gives up."""
    assert agent.calls
    assert agent.careful
    answers = task.refused(agent.calls, agent.refusal)
    async with stage(tmp_path, agent.models, answers, careful=True) as on:
        text = await on.run(*agent.careful, task.REFUSED_PROMPT)
        assert task.GIVEN_UP in text, f"{text[-3000:]}\n{on.recorder.summary()}"
        assert not (on.work / task.FORBIDDEN).exists()


@each_agent
async def test_a_turn_that_is_interrupted_and_continued(tmp_path: Path, agent: Agent) -> None:
    """Ctrl-C while an answer is streamed ends its request in the fleet; the conversation goes on from there."""
    answers = task.script(agent.calls) if agent.calls else task.edits()
    answers.append(Answer(task.LONG_PROMPT, task.LONG))
    async with stage(tmp_path, agent.models, answers, step_time="default") as on:
        on.recorder.awaited = b'":"~'
        process = await on.start(*agent.task, task.LONG_PROMPT)
        try:
            async with asyncio.timeout(WITHIN_S):
                await on.recorder.seen.wait()
                for _ in range(agent.interrupts):
                    os.killpg(process.pid, signal.SIGINT)
                await process.communicate()
        finally:
            end(process)
        async with asyncio.timeout(WITHIN_S):
            while not await on.metric("headwater_edge_requests_total", lambda line: '"cancelled"' in line):
                await asyncio.sleep(0.1)
        before = len(on.recorder.generated)
        text = await on.run(*agent.resume, task.MESSAGES[-1] if agent.calls is None else task.PROMPT)
        assert task.DONE in " ".join(text.split()), f"{text[-3000:]}\n{on.recorder.summary()}"
        resumed = str(on.recorder.generated[before].body)
        assert task.LONG_PROMPT in resumed


@each_agent
async def test_a_conversation_that_is_summarized(tmp_path: Path, agent: Agent) -> None:
    """When the context is full the agent has the model summarize, and goes on."""
    answers = task.summarized(agent.calls, agent.compacted) if agent.calls else task.edits()
    async with stage(tmp_path, agent.models, answers, compacts=True) as on:
        if agent.calls is None:
            text = await on.run(*agent.task[:-1], messages=task.MESSAGES)
        else:
            text = await on.run(*agent.task, task.SUMMARIZED_PROMPT)
        on.check(text)
        assert any(agent.compacted in str(one.body) for one in on.recorder.generated), on.recorder.summary()


@each_agent
async def test_an_image(tmp_path: Path, agent: Agent) -> None:
    """The model gets the pixels, as each agent sends images: with the prompt, or as the result of a tool."""
    async with stage(tmp_path, agent.models, task.image(tmp_path / "work" / PICTURE)) as on:
        allowed = (*CLAUDE.task[:3], "-p") if agent is CLAUDE else agent.task
        text = await on.run(*allowed, agent.image_prompt, *agent.image_flags)
        width, height = task.SIZE
        said = f"an image of {width} x {height} pixels"
        assert said in " ".join(text.split()), f"{text[-3000:]}\n{on.recorder.summary()}"


@each_agent
async def test_refusals_and_a_dead_worker(tmp_path: Path, agent: Agent) -> None:
    """The agent tries again by itself after 529, 503 and 429. Of a worker's death it notices nothing."""
    answers = task.script(agent.calls) if agent.calls else task.edits()
    async with stage(tmp_path, agent.models, answers) as on:
        on.recorder.refusals = [529, 503, 429]
        on.recorder.before[7] = lambda: on.up.kill("engine --name worker-0")
        await work_through(on, agent)
        assert not on.recorder.refusals
        assert not on.recorder.before
        assert not await on.metric("headwater_edge_http_errors_total")
