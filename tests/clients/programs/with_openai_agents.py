"""The OpenAI Agents SDK, on chat completions and on the Responses API (its default)."""

import json
from functools import partial
from typing import Any

import agents
from agents import Agent, FunctionTool, Runner
from openai import AsyncOpenAI
from scenarios import Task

agents.set_tracing_disabled(True)


def agent_of(kind: Any, task: Task, called: list[str]) -> Agent:
    client = AsyncOpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0)

    def tool(definition: dict[str, Any]) -> FunctionTool:
        async def invoke(_: Any, arguments: str) -> str:
            called.append(definition["name"])
            return task.call(definition["name"], json.loads(arguments))

        return FunctionTool(
            name=definition["name"],
            description=definition["description"],
            params_json_schema=definition["parameters"],
            on_invoke_tool=invoke,
            strict_json_schema=False,
        )

    tools: list[Any] = [tool(each["function"]) for each in task.tools]
    return Agent(name="guide", model=kind(model=task.model, openai_client=client), tools=tools)


async def loop(kind: Any, task: Task) -> None:
    called: list[str] = []
    done = await Runner.run(agent_of(kind, task, called), task.question, max_turns=3)
    assert done.final_output == task.answer
    assert sorted(called) == ["get_weather", "search"]


async def streamed(kind: Any, task: Task) -> None:
    called: list[str] = []
    run = Runner.run_streamed(agent_of(kind, task, called), task.question, max_turns=3)
    deltas = 0
    async for event in run.stream_events():
        deltas += event.type == "raw_response_event"
    assert run.final_output == task.answer
    assert deltas > 2
    assert sorted(called) == ["get_weather", "search"]


CHAT, RESPONSES = agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel

PACKAGE = "openai-agents"

SCENARIOS: dict[str, Any] = {
    "tool loop": partial(loop, CHAT),
    "tool loop streamed": partial(streamed, CHAT),
    "responses tool loop": partial(loop, RESPONSES),
    "responses tool loop streamed": partial(streamed, RESPONSES),
}
