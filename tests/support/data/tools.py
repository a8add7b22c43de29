"""A tool, and conversations that use it."""

import json
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA},
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object"}},
}


def hermes(name: str, **arguments: Any) -> str:
    """A call as Hermes models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The documents of a stream, which ends with [DONE]."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: ")]


def joined_choices(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The messages that a stream of chat chunks adds up to, as its clients put them together, by choice."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            message = found.setdefault(choice["index"], {"message": {}, "finish_reason": None})
            if choice["finish_reason"]:
                assert message["finish_reason"] is None, "one end per choice"
                message["finish_reason"] = choice["finish_reason"]
            _join(message["message"], choice["delta"])
    return found


def _join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for piece in value:
                if piece["index"] == len(calls):
                    assert piece["id"], "an id comes with the first piece"
                    calls.append(
                        {"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])}
                    )
                else:
                    assert set(piece) == {"index", "function"}, "and with no other"
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        elif name == "role":
            message["role"] = value
        else:
            message[name] = message.get(name, "") + value
