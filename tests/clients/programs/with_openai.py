"""The official `openai` client: chat and completions, whole and streamed, and tool loops."""

import json
from typing import Any

import openai
from openai import OpenAI
from scenarios import Task


def client_of(task: Task) -> OpenAI:
    return OpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def ask(task: Task) -> list[Any]:
    return [{"role": "user", "content": task.question}]


def chat(task: Task) -> None:
    done = client_of(task).chat.completions.create(
        model=task.model, messages=[{"role": "user", "content": "Hi"}]
    )
    assert done.choices[0].message.content == task.greeting
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def chat_streamed(task: Task) -> None:
    stream = client_of(task).chat.completions.create(
        model=task.model,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, thought, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
    assert text == task.greeting
    assert thought.strip() == task.reasoning
    assert usage is not None


def completion(task: Task) -> None:
    done = client_of(task).completions.create(model=task.model, prompt="Hi", max_tokens=4)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 4


def tools(task: Task) -> None:
    client, messages = client_of(task), ask(task)
    for _ in range(3):
        message = (
            client.chat.completions.create(model=task.model, messages=messages, tools=task.tools)
            .choices[0]
            .message
        )
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        assert len(message.tool_calls) == len(task.calls)
        for call in message.tool_calls:
            result = task.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == task.answer


def tools_streamed(task: Task) -> None:
    client, messages = client_of(task), ask(task)
    for _ in range(3):
        with client.chat.completions.stream(model=task.model, messages=messages, tools=task.tools) as stream:
            pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            done = stream.get_final_completion().choices[0]
        messages.append(done.message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not done.message.tool_calls:
            break
        assert done.finish_reason == "tool_calls"
        assert len(pieces) > len(task.calls), "arguments come in pieces"
        for call in done.message.tool_calls:
            call_arguments = json.loads(call.function.arguments)
            result = task.call(call.function.name, call_arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert done.message.content == task.answer


def forced(task: Task) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        message = (
            client_of(task)
            .chat.completions.create(
                model=task.model, messages=ask(task), tools=task.tools[:1], tool_choice=choice
            )
            .choices[0]
            .message
        )
        assert [call.function.name for call in message.tool_calls] == ["get_weather"]
        assert "city" in json.loads(message.tool_calls[0].function.arguments)


def unknown_model(task: Task) -> None:
    try:
        client_of(task).chat.completions.create(model="none", messages=ask(task))
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was served")


def responses(task: Task) -> None:
    client, given = client_of(task), ask(task)
    definitions = [{"type": "function", **tool["function"]} for tool in task.tools]
    previous = openai.NOT_GIVEN
    for _ in range(3):
        response = client.responses.create(
            model=task.model, input=given, tools=definitions, previous_response_id=previous
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        previous = response.id
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": task.call(call.name, json.loads(call.arguments)),
            }
            for call in calls
        ]
    assert response.output_text == task.answer


def responses_streamed(task: Task) -> None:
    client, given = client_of(task), ask(task)
    definitions = [{"type": "function", **tool["function"]} for tool in task.tools]
    for _ in range(3):
        with client.responses.stream(model=task.model, input=given, tools=definitions) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            arguments = json.loads(call.arguments)
            given.append(
                {
                    "type": "function_call",
                    "call_id": call.call_id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            )
            output = task.call(call.name, arguments)
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert response.output_text == task.answer


def image(task: Task) -> None:
    url = f"data:image/png;base64,{task.picture}"
    content = [
        {"type": "text", "text": "What is in this image?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]
    done = client_of(task).chat.completions.create(
        model=task.model, messages=[{"role": "user", "content": content}]
    )
    assert done.choices[0].message.content == task.picture_shown


def audio(task: Task) -> None:
    content = [
        {"type": "text", "text": "What is in this recording?"},
        {"type": "input_audio", "input_audio": {"data": task.sound, "format": "wav"}},
    ]
    done = client_of(task).chat.completions.create(
        model=task.model, modalities=["text"], messages=[{"role": "user", "content": content}]
    )
    assert done.choices[0].message.content == task.sound_shown
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.audio_tokens


def responses_image(task: Task) -> None:
    """Once sent, and then from what the server has stored."""
    client = client_of(task)
    content = [
        {"type": "input_text", "text": "what's in this image?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{task.picture}"},
    ]
    first = client.responses.create(model=task.model, input=[{"role": "user", "content": content}])
    assert first.output_text == task.picture_shown
    second = client.responses.create(model=task.model, input="And now?", previous_response_id=first.id)
    assert second.output_text == task.picture_shown


PACKAGE = "openai"

SCENARIOS: dict[str, Any] = {
    "chat": chat,
    "chat streamed": chat_streamed,
    "completion": completion,
    "tool loop": tools,
    "tool loop streamed": tools_streamed,
    "forced calls": forced,
    "unknown model": unknown_model,
    "responses tool loop": responses,
    "responses tool loop streamed": responses_streamed,
    "image": image,
    "audio": audio,
    "responses image": responses_image,
}
