"""The official `anthropic` client: messages whole and streamed, tool loops, thinking, counting, errors."""

from typing import Any

import anthropic
from anthropic import Anthropic
from scenarios import Task


def client_of(task: Task) -> Anthropic:
    return Anthropic(base_url=task.url, api_key="none", max_retries=0, _strict_response_validation=True)


def definitions(task: Task) -> list[Any]:
    functions = [tool["function"] for tool in task.tools]
    return [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in functions
    ]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def chat(task: Task) -> None:
    message = client_of(task).messages.create(
        model=task.model, max_tokens=500, system="Be kind.", messages=[{"role": "user", "content": "Hi"}]
    )
    assert text_of(message) == task.greeting
    assert message.stop_reason == "end_turn"
    assert message._request_id, "the header request-id"
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0


def chat_streamed(task: Task) -> None:
    with client_of(task).messages.stream(
        model=task.model, max_tokens=500, messages=[{"role": "user", "content": "Hi"}]
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == text_of(message) == task.greeting
    assert message.usage.output_tokens > 0


def thinking(task: Task) -> None:
    for display, shown in (("summarized", task.reasoning), ("omitted", "")):
        with client_of(task).messages.stream(
            model=task.model,
            max_tokens=500,
            thinking={"type": "enabled", "budget_tokens": 200, "display": display},
            messages=[{"role": "user", "content": "Hi"}],
        ) as stream:
            message = stream.get_final_message()
        block = message.content[0]
        assert block.type == "thinking"
        assert block.thinking.strip() == shown
        assert block.signature


def not_thinking(task: Task) -> None:
    message = client_of(task).messages.create(
        model=task.model,
        max_tokens=500,
        thinking={"type": "disabled"},
        messages=[{"role": "user", "content": "Hi"}],
    )
    assert [block.type for block in message.content] == ["text"]


def loop(task: Task, *, stream: bool) -> None:
    client, messages = client_of(task), [{"role": "user", "content": task.question}]
    for _ in range(3):
        fields: Any = {
            "model": task.model,
            "max_tokens": 500,
            "tools": definitions(task),
            "messages": messages,
        }
        if stream:
            with client.messages.stream(**fields) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**fields)
        if message.stop_reason != "tool_use":
            break
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": task.call(block.name, dict(block.input)),
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        assert len(results) == len(task.calls)
        messages.append({"role": "user", "content": results})
    assert text_of(message) == task.answer


def tools(task: Task) -> None:
    loop(task, stream=False)


def tools_streamed(task: Task) -> None:
    loop(task, stream=True)


def forced(task: Task) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = client_of(task).messages.create(
            model=task.model,
            max_tokens=500,
            tools=definitions(task)[:1],
            tool_choice=choice,
            messages=[{"role": "user", "content": task.question}],
        )
        assert message.stop_reason == "tool_use"
        assert [block.name for block in message.content if block.type == "tool_use"] == ["get_weather"]


def stop_sequence(task: Task) -> None:
    message = client_of(task).messages.create(
        model=task.model,
        max_tokens=500,
        stop_sequences=["How can"],
        messages=[{"role": "user", "content": "Hi"}],
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "How can")
    assert text_of(message).strip() == task.greeting.partition("How can")[0].strip()


def max_tokens(task: Task) -> None:
    message = client_of(task).messages.create(
        model=task.model, max_tokens=3, messages=[{"role": "user", "content": "Hi"}]
    )
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def counting(task: Task) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    count = client_of(task).messages.count_tokens(
        model=task.model, messages=messages, tools=definitions(task)
    )
    usage = (
        client_of(task)
        .messages.create(model=task.model, max_tokens=9, messages=messages, tools=definitions(task))
        .usage
    )
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert count.input_tokens == usage.input_tokens + read + written


def errors(task: Task) -> None:
    client = client_of(task)
    try:
        client.messages.create(model="none", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
    except anthropic.NotFoundError as error:
        assert error.type == "not_found_error"
        assert error.request_id
    else:
        raise AssertionError("an unknown model was served")
    try:
        client.messages.create(model=task.model, max_tokens=9, messages=[])
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error"
        assert "messages" in str(error)
    else:
        raise AssertionError("a request without messages was served")


def picture_block(task: Task) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": task.picture}
    return {"type": "image", "source": source}


def image(task: Task) -> None:
    content = [picture_block(task), {"type": "text", "text": "Describe this image."}]
    message = client_of(task).messages.create(
        model=task.model, max_tokens=500, messages=[{"role": "user", "content": content}]
    )
    assert text_of(message) == task.picture_shown


def image_of_a_tool(task: Task) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "screenshot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture_block(task)]}
    message = client_of(task).messages.create(
        model=task.model,
        max_tokens=500,
        tools=[{"name": "screenshot", "input_schema": {"type": "object"}}],
        messages=[
            {"role": "user", "content": "What is on the screen?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    )
    assert text_of(message) == task.picture_shown


PACKAGE = "anthropic"

SCENARIOS: dict[str, Any] = {
    "chat": chat,
    "chat streamed": chat_streamed,
    "thinking": thinking,
    "not thinking": not_thinking,
    "tool loop": tools,
    "tool loop streamed": tools_streamed,
    "forced calls": forced,
    "stop sequence": stop_sequence,
    "max tokens": max_tokens,
    "counting": counting,
    "errors": errors,
    "image": image,
    "image as a tool's result": image_of_a_tool,
}
