"""Instructor: answers as objects, by a named tool call and by a JSON schema, whole and streamed."""

from typing import Any

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from scenarios import Task


class Place(BaseModel):
    """Where a question is about."""

    city: str
    country: str


def ask(task: Task) -> Any:
    return {"model": task.model, "messages": [{"role": "user", "content": task.question}], "max_retries": 0}


def openai_client(task: Task, mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{task.url}/v1", api_key="none"), mode=mode)


def tools(task: Task) -> None:
    place = openai_client(task, instructor.Mode.TOOLS).create(response_model=Place, **ask(task))
    assert isinstance(place, Place)


def tools_streamed(task: Task) -> None:
    pieces = list(
        openai_client(task, instructor.Mode.TOOLS).create_partial(response_model=Place, **ask(task))
    )
    assert pieces[-1].city
    assert pieces[-1].country


def json_schema(task: Task) -> None:
    place = openai_client(task, instructor.Mode.JSON_SCHEMA).create(response_model=Place, **ask(task))
    assert isinstance(place, Place)


def anthropic_tools(task: Task) -> None:
    client: Any = instructor.from_anthropic(Anthropic(base_url=task.url, api_key="none"))
    place = client.create(response_model=Place, max_tokens=500, **ask(task))
    assert isinstance(place, Place)


PACKAGE = "instructor"

SCENARIOS: dict[str, Any] = {
    "named call": tools,
    "named call streamed": tools_streamed,
    "json schema": json_schema,
    "anthropic named call": anthropic_tools,
}
