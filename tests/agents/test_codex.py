"""What only Codex does: Responses over WebSocket, other tools under other models' names, programs that call tools, agents of an agent."""

from pathlib import Path

import pytest

from tests.agents import codex, task
from tests.agents.agents import CODEX, CODEX_CODE, PICTURE, Agent
from tests.agents.stage import stage
from tests.agents.test_agents import work_through
from tests.support.engines.scripted import Answer

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(400)]

each_transport = pytest.mark.parametrize("websockets", [False, True], ids=["HTTP", "WebSocket"])


@pytest.mark.parametrize("agent", [CODEX, CODEX_CODE], ids=["tools", "code-mode"])
async def test_a_task_over_a_websocket(tmp_path: Path, agent: Agent) -> None:
    """It stores the first part of its prompt in advance, and sends what is new with the id of the last response."""
    assert agent.calls
    async with stage(tmp_path, agent.models, task.script(agent.calls), websockets=True) as on:
        await work_through(on, agent)
        sent = [one.body for one in on.recorder.generated if one.body]
        assert {one.path for one in on.recorder.generated} == {"websocket"}
        assert sent[0]["generate"] is False
        assert all("previous_response_id" in one for one in sent[1:])


@each_transport
@pytest.mark.parametrize("name", ["gpt-5.5", "gpt-5.6-sol", "gpt-6.1-sol", codex.CODE_MODEL])
async def test_the_names_of_its_models(tmp_path: Path, name: str, websockets: bool) -> None:
    """What it offers differs: from 5.6 its tools are an item of the conversation, and over WebSocket it begins with an empty input."""
    async with stage(tmp_path, name, [Answer("", task.DONE)], websockets=websockets) as on:
        assert task.DONE in await on.run(*CODEX.task, "--model", name, task.PROMPT)
        offered = [one.body for one in on.recorder.generated if one.body]
        items = [item for one in offered for item in one["input"]]
        assert any(item["type"] == "additional_tools" for item in items) == (name != "gpt-5.5")
        assert not await on.metric("headwater_edge_http_errors_total")


@each_transport
async def test_programs(tmp_path: Path, websockets: bool) -> None:
    """Code mode: two results of one call, a patch, a program that goes on and is waited for, one that is wrong, and one that fails."""
    async with stage(tmp_path, CODEX_CODE.models, codex.other_programs(), websockets=websockets) as on:
        on.check(await on.run(*CODEX_CODE.task, codex.PROGRAMS_PROMPT))
        items = [item for one in on.recorder.generated if one.body for item in one.body["input"]]
        results = {item["call_id"]: item for item in items if item["type"] == "custom_tool_call_output"}
        assert len(results) == 4
        assert any(item.get("output") == "noted" for item in items)


async def test_an_image_that_a_program_looks_at(tmp_path: Path) -> None:
    """Code mode: the image is in the result of a custom tool."""
    async with stage(tmp_path, CODEX_CODE.models, codex.looking(PICTURE)) as on:
        text = await on.run(*CODEX_CODE.task, codex.LOOK_PROMPT)
        width, height = task.SIZE
        assert f"an image of {width} x {height} pixels" in " ".join(text.split()), text[-3000:]


@each_transport
async def test_a_second_agent(tmp_path: Path, websockets: bool) -> None:
    """Code mode: the agent starts another one. Its task, and its answer, are messages of an agent."""
    async with stage(tmp_path, CODEX_CODE.models, codex.team(), websockets=websockets) as on:
        text = await on.run(*CODEX_CODE.task, codex.TEAM_PROMPT)
        assert task.DONE in text, f"{text[-3000:]}\n{on.recorder.summary()}"
        items = [item for one in on.recorder.generated if one.body for item in one.body["input"]]
        authors = {item["author"] for item in items if item["type"] == "agent_message"}
        assert authors == {"/root", "/root/second"}
