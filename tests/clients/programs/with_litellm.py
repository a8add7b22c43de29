"""LiteLLM, through its providers for OpenAI and Anthropic."""

import json
from functools import partial
from typing import Any

import litellm
from scenarios import Task

litellm.telemetry = False
litellm.suppress_debug_info = True


def loop(provider: str, stream: bool, task: Task) -> None:
    url = f"{task.url}/v1" if provider == "openai" else task.url
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for _ in range(3):
        done: Any = litellm.completion(
            model=f"{provider}/{task.model}",
            api_base=url,
            api_key="none",
            messages=messages,
            tools=task.tools,
            max_tokens=500,
            stream=stream,
            num_retries=0,
        )
        if stream:
            done = litellm.stream_chunk_builder(list(done), messages=messages)
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        assert len(message.tool_calls) == len(task.calls)
        for call in message.tool_calls:
            result = task.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == task.answer, message


def shown(provider: str, part: str, task: Task) -> None:
    parts = {
        "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{task.picture}"}},
        "audio": {"type": "input_audio", "input_audio": {"data": task.sound, "format": "wav"}},
    }
    done: Any = litellm.completion(
        model=f"{provider}/{task.model}",
        api_base=f"{task.url}/v1" if provider == "openai" else task.url,
        api_key="none",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Describe it."}, parts[part]]}],
        max_tokens=500,
        num_retries=0,
    )
    expected = task.picture_shown if part == "image" else task.sound_shown
    assert done.choices[0].message.content == expected, done


PACKAGE = "litellm"

SCENARIOS: dict[str, Any] = {
    "tool loop": partial(loop, "openai", False),
    "tool loop streamed": partial(loop, "openai", True),
    "anthropic tool loop": partial(loop, "anthropic", False),
    "anthropic tool loop streamed": partial(loop, "anthropic", True),
    "image": partial(shown, "openai", "image"),
    "audio": partial(shown, "openai", "audio"),
    "anthropic image": partial(shown, "anthropic", "image"),
}
