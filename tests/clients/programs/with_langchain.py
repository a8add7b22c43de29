"""LangChain's chat models for OpenAI and Anthropic."""

from functools import partial
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from scenarios import Task


def model_of(provider: str, task: Task) -> Any:
    if provider == "openai":
        return ChatOpenAI(
            model=task.model, base_url=f"{task.url}/v1", api_key="none", max_retries=0, stream_usage=True
        )
    return ChatAnthropic(
        model=task.model, base_url=task.url, api_key="none", max_retries=0, max_tokens=500, timeout=60
    )


def loop(provider: str, stream: bool, task: Task) -> None:
    model = model_of(provider, task).bind_tools(task.tools)
    messages: list[Any] = [HumanMessage(task.question)]
    for _ in range(3):
        if stream:
            chunks = list(model.stream(messages))
            message = chunks[0]
            for chunk in chunks[1:]:
                message = message + chunk
            assert len(chunks) > 2
        else:
            message = model.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            break
        assert len(message.tool_calls) == len(task.calls)
        for call in message.tool_calls:
            messages.append(ToolMessage(task.call(call["name"], call["args"]), tool_call_id=call["id"]))
    assert message.text == task.answer, message
    assert message.usage_metadata["output_tokens"] > 0


def shown(provider: str, kind: str, task: Task) -> None:
    data, mime = (task.picture, "image/png") if kind == "image" else (task.sound, "audio/wav")
    block = {"type": kind, "base64": data, "mime_type": mime}
    message = model_of(provider, task).invoke(
        [HumanMessage([{"type": "text", "text": "Describe it."}, block])]
    )
    assert message.text == (task.picture_shown if kind == "image" else task.sound_shown), message


PACKAGE = "langchain-core"

SCENARIOS: dict[str, Any] = {
    "tool loop": partial(loop, "openai", False),
    "tool loop streamed": partial(loop, "openai", True),
    "anthropic tool loop": partial(loop, "anthropic", False),
    "anthropic tool loop streamed": partial(loop, "anthropic", True),
    "image": partial(shown, "openai", "image"),
    "audio": partial(shown, "openai", "audio"),
    "anthropic image": partial(shown, "anthropic", "image"),
}
