"""What only Claude Code does: tools that it offers once they are found, other requests under other models' names, agents of an agent."""

from pathlib import Path

import pytest

from tests.agents import task
from tests.agents.agents import CLAUDE
from tests.agents.stage import stage
from tests.agents.task import Call, written
from tests.support.engines.scripted import Answer

pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(400)]

BACKGROUND = {"foreground": False, "background": True}
NAMES = ("claude-haiku-5-5", "claude-sonnet-5-5", "claude-opus-5-5", "claude-fable-5-2")


def _second(*, background: bool) -> Call:
    return "Agent", {
        "description": "Looks into it",
        "prompt": "Look into it: secondword",
        "subagent_type": "general-purpose",
        "run_in_background": background,
    }


async def test_a_tool_that_is_searched(tmp_path: Path) -> None:
    """Its search finds a deferred tool, which is in the prompt from then on, and is called."""
    answers = [
        task.NOTHING,
        Answer("searchword", written([("ToolSearch", {"query": "select:TaskCreate"})])),
        Answer(
            "The tool TaskCreate is available.",
            written([("TaskCreate", {"subject": "foundword", "description": "A task"})]),
        ),
        Answer("created successfully: foundword", task.DONE),
    ]
    async with stage(tmp_path, CLAUDE.models, answers) as on:
        text = await on.run(*CLAUDE.task, "searchword")
        assert task.DONE in text, f"{text[-3000:]}\n{on.recorder.summary()}"
        offered = [one.body["tools"] for one in on.recorder.generated]
        deferred = [{tool["name"] for tool in tools if tool.get("defer_loading")} for tools in offered]
        assert "TaskCreate" not in deferred[0]
        assert "TaskCreate" in deferred[-1]


@pytest.mark.parametrize("background", BACKGROUND.values(), ids=BACKGROUND)
async def test_a_second_agent(tmp_path: Path, background: bool) -> None:
    """It works in a conversation of its own, and its answer is a result, or a message that comes later."""
    answers = [
        task.NOTHING,
        Answer("teamword", written([_second(background=background)])),
        Answer("secondword", "It has been looked into: found'word"),
        Answer("found'word", task.DONE),
    ]
    async with stage(tmp_path, CLAUDE.models, answers) as on:
        text = await on.run(*CLAUDE.task, "teamword")
        assert task.DONE in text, f"{text[-3000:]}\n{on.recorder.summary()}"
        first = [str(one.body["messages"][0]) for one in on.recorder.generated]
        assert any("Look into it" in one for one in first)


@pytest.mark.parametrize("name", NAMES)
async def test_the_names_of_its_models(tmp_path: Path, name: str) -> None:
    """What it asks for differs: how a model thinks, with what effort, and what is removed from its context."""
    assert CLAUDE.calls
    answers = task.script(CLAUDE.calls)
    async with stage(tmp_path, name, answers) as on:
        on.check(await on.run(CLAUDE.task[0], "--model", name, *CLAUDE.task[3:], task.PROMPT))
        assert not await on.metric("headwater_edge_http_errors_total")
