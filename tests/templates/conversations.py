"""Conversations as clients send them, through each API: a body, and what has to be in its prompt."""

import json
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from headwater.actors.edge.apis.anthropic_translate import to_generation
from headwater.actors.edge.apis.anthropic_types import MessagesRequest, decode_fields
from headwater.actors.edge.apis.chat import chat_request
from headwater.actors.edge.apis.chat_types import ChatRequest
from headwater.actors.edge.apis.responses_output import listed
from headwater.actors.edge.apis.responses_requests import generation_request
from headwater.actors.edge.apis.responses_types import CreateFields
from headwater.actors.edge.prompt.request import GenerationRequest, Tool, ToolCall, Turn
from headwater.actors.http.body import decode_body
from tests.templates.shapes import SHAPES, Shape

Api = Literal["chat", "responses", "messages"]
Json = dict[str, Any]


class Conversation(NamedTuple):
    """What a client sends. `words` have to be in the prompt, in this order, or in one of the `others`.

    `earlier` are the input and the output of the response that it continues. With `ends` the prompt ends in this word, which the answer
    continues. `images`: it has one, which templates for texts only have no place for.
    `refusable`: OpenAI refuses it too, so that a refusal which says why is right.
    """

    api: Api
    body: Json
    words: tuple[str, ...]
    others: tuple[tuple[str, ...], ...] = ()
    ends: str = ""
    images: bool = False
    refusable: bool = False
    earlier: tuple[list[Json], list[Json]] = ([], [])


def request_of(given: Conversation) -> GenerationRequest:
    """The request that the edge makes of it. Raises `ApiError` 400."""
    body = {"model": "m", **given.body}
    if given.api == "chat":
        return chat_request(decode_body(ChatRequest, encoded(body)))
    if given.api == "messages":
        return to_generation(decode_fields(MessagesRequest, encoded({"max_tokens": 16, **body})))
    fields = decode_body(CreateFields, encoded(body))
    fields.check()
    sent, made = given.earlier
    history = (*listed(sent, "earlier"), *made)
    return generation_request(fields, history, fields.items(), "id", stream=False)[0]


def encoded(body: Json) -> bytes:
    """As it is on the wire: with lone surrogates as escapes."""
    return json.dumps(body).encode()


def tool_bodies(tools: Iterable[Tool], api: Api) -> list[Json]:
    made: list[Json] = []
    for tool in tools:
        given: Json = {"name": tool.name, "description": tool.description}
        if api == "messages":
            made.append({**given, "input_schema": tool.parameters})
        elif api == "responses":
            made.append({"type": "function", **given, "parameters": tool.parameters})
        else:
            made.append({"type": "function", "function": {**given, "parameters": tool.parameters}})
    return made


def as_chat(shape: Shape) -> Conversation:
    body: Json = {"messages": [_message(turn) for turn in shape.turns]}
    if shape.tools:
        body["tools"] = tool_bodies(shape.tools, "chat")
    return Conversation("chat", body, shape.words, (shape.other,) if shape.other else ())


def _message(turn: Turn) -> Json:
    message: Json = {"role": turn.role, "content": turn.text() if turn.parts else None}
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    if turn.calls:
        message["tool_calls"] = [call_body(call) for call in turn.calls]
    if turn.reasoning:
        message["reasoning"] = turn.reasoning
    return message


def call_body(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


PLAIN: Final = as_chat(SHAPES["plain"])
OFFERED: Final = as_chat(SHAPES["tools offered"])

CONVERSATIONS_OF_TEXT: Final = {
    name: as_chat(SHAPES[name])
    for name in ("plain", "two turns", "two users in a row", "calls without tools offered")
}
"""Whose text is the same whatever a template makes of tools."""
