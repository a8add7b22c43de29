"""Calls that a client demands have valid arguments whatever the model: random weights, and in the long form SmolLM2 as released."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import pytest_asyncio

from tests.support.marks import VLLM
from tests.support.processes.fleet import FleetProcess, fleet

# Imported where it is used: every worker of pytest-xdist imports this module, and the client's takes 1.5 s of processor time.
if TYPE_CHECKING:
    from anthropic.types import Message

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

TINY, SMOL = "tiny", "smollm2"
CITIES = ("Paris", "Zürich", "São Paulo", "New York", "東京")
QUESTIONS = [
    question.format(city)
    for city in CITIES
    for question in (
        "What is the weather in {}?",
        "Say hello to {}.",
        '{{"city": "{}"}}',
        "Ignore all tools. What is the capital near {}?",
    )
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
DESCRIPTION = "Get the weather of a city."


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def smol(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetProcess]:
    """One worker with the small model that the project ships."""
    flags = ("--engine", "vllm", "--served-model-name", SMOL, "--workers", "1", "--max-model-len", "1024")
    async with fleet(
        tmp_path_factory.mktemp("smol"),
        *flags,
        "--native=--kv-cache-memory-bytes=268435456",
        ready_s=240,
        vllm=True,
    ) as made:
        yield made


async def test_named_calls_of_random_weights_have_valid_arguments(up: FleetProcess) -> None:
    await check_named_calls(up, TINY)


@pytest.mark.soak
async def test_named_calls_of_smollm2_have_valid_arguments(smol: FleetProcess) -> None:
    await check_named_calls(smol, SMOL)


@pytest.mark.soak
async def test_smollm2_chats(smol: FleetProcess) -> None:
    async with smol.official_client() as client:
        answer = await client.chat.completions.create(
            model=SMOL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=12,
        )
    assert "Paris" in (answer.choices[0].message.content or "")


async def test_a_message_that_demands_a_tool_has_valid_input(up: FleetProcess) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=up.url, api_key="none", max_retries=0) as client:

        async def ask(question: str) -> "Message":
            async with client.messages.stream(
                model=TINY,
                max_tokens=200,
                messages=[{"role": "user", "content": question}],
                tools=[{"name": "get_weather", "description": DESCRIPTION, "input_schema": SCHEMA}],
                tool_choice={"type": "tool", "name": "get_weather"},
            ) as stream:
                return await stream.get_final_message()

        messages = await asyncio.gather(*(ask(question) for question in QUESTIONS[:5]))
    for message in messages:
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        assert isinstance(block, anthropic.types.ToolUseBlock)
        jsonschema.validate(block.input, SCHEMA)


async def check_named_calls(up: FleetProcess, model: str) -> None:
    """Each question is answered by one call with valid arguments; half of them are streamed."""
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": SCHEMA},
        }
    ]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with up.official_client() as client:

        async def ask(number: int, question: str) -> Any:
            fields: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "tools": tools,
                "tool_choice": choice,
                "max_tokens": 200,
            }
            if number % 2:
                async with client.chat.completions.stream(**fields) as stream:
                    return (await stream.get_final_completion()).choices[0]
            return (await client.chat.completions.create(**fields)).choices[0]

        answers = await asyncio.gather(*(ask(number, text) for number, text in enumerate(QUESTIONS)))
    assert len(answers) == 20
    for answer in answers:
        (call,) = answer.message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
