"""Judges: the official client's types, strictly, with no value converted, and the schema of Open Responses."""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_comply.schema import SpecLoader
    from openai.types.conversations import ConversationItemList
    from openai.types.responses import Response, ResponseItemList
    from pydantic import TypeAdapter

_EVENT_PATTERN = re.compile(rb"event: (?P<name>[^\n]*)\ndata: (?P<data>[^\n]*)\n\n")


@cache
def _event() -> "TypeAdapter[Any]":
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(ResponseStreamEvent)


@cache
def _spec() -> "SpecLoader":
    from llm_comply import schema

    return schema.SpecLoader(str(schema._BUNDLED_SPEC))


def check_event(data: bytes) -> Any:
    return _event().validate_json(data, strict=True)


def check_response(data: bytes) -> "Response":
    from openai.types.responses import Response

    return Response.model_validate_json(data, strict=True)


def check_items(data: bytes) -> "ResponseItemList":
    from openai.types.responses import ResponseItemList

    return ResponseItemList.model_validate_json(data, strict=True)


def check_conversation_items(data: bytes) -> "ConversationItemList":
    from openai.types.conversations import ConversationItemList

    return ConversationItemList.model_validate_json(data, strict=True)


def check_schema(document: Any, name: str) -> None:
    """An object by the schema of Open Responses, which llm-comply contains."""
    assert not _spec().validate(document, name)


def events_of(stream: bytes) -> list[Any]:
    """All events of a stream, checked: each one's name is its type, and they are numbered from 0 without gaps."""
    events = []
    at = 0
    while at < len(stream):
        if stream.startswith(b": ping\n\n", at):
            at += 8
            continue
        match = _EVENT_PATTERN.match(stream, at)
        assert match is not None, stream[at : at + 200]
        event = check_event(match["data"])
        assert event.type == match["name"].decode()
        events.append(event)
        at = match.end()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events
