"""Pydantic AI's agents, on its models for OpenAI and Anthropic."""

from functools import partial
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scenarios import Task


class City(BaseModel):
    """A city."""

    name: str


def model_of(provider: str, task: Task) -> Any:
    if provider == "openai":
        return OpenAIChatModel(task.model, provider=OpenAIProvider(base_url=f"{task.url}/v1", api_key="none"))
    return AnthropicModel(task.model, provider=AnthropicProvider(base_url=task.url, api_key="none"))


def agent_of(provider: str, task: Task, called: list[str]) -> Agent:
    agent = Agent(model_of(provider, task), retries=0)

    @agent.tool_plain
    def get_weather(city: str, unit: str = "c") -> str:
        """Get the current weather for a city."""
        called.append("get_weather")
        return task.call("get_weather", {"city": city, "unit": unit})

    @agent.tool_plain
    def search(query: str, filters: dict[str, Any]) -> str:
        """Search the web."""
        called.append("search")
        return task.call("search", {"query": query, "filters": filters})

    return agent


def loop(provider: str, task: Task) -> None:
    called: list[str] = []
    done = agent_of(provider, task, called).run_sync(task.question)
    assert done.output == task.answer
    assert sorted(called) == ["get_weather", "search"]


async def streamed(provider: str, task: Task) -> None:
    called: list[str] = []
    async with agent_of(provider, task, called).run_stream(task.question) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == task.answer
    assert len(pieces) > 1
    assert sorted(called) == ["get_weather", "search"]


def output_type(provider: str, task: Task) -> None:
    done = Agent(model_of(provider, task), output_type=City).run_sync("Which city?")
    assert isinstance(done.output, City)


PACKAGE = "pydantic-ai-slim"

SCENARIOS: dict[str, Any] = {
    "tool loop": partial(loop, "openai"),
    "tool loop streamed": partial(streamed, "openai"),
    "output type": partial(output_type, "openai"),
    "anthropic tool loop": partial(loop, "anthropic"),
    "anthropic tool loop streamed": partial(streamed, "anthropic"),
    "anthropic output type": partial(output_type, "anthropic"),
}
