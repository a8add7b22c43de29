"""Output items: each knows its own events while it is generated, and its form when it is stored or listed. Pure.

An item is added, gets its content in deltas, and is done; what is done is what the whole response contains.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from headwater.actors.edge.apis.responses_items import CUSTOM_INPUT, Item, encode_opaque

Event = tuple[str, dict[str, Any]]
"""An event's type, and its members without `type` and `sequence_number`."""

Ending = Literal["completed", "incomplete"]


class OutputItem(ABC):
    """An item that is being generated. `place` is what its events say about where it is."""

    def __init__(self, id_: str, index: int, head: dict[str, Any]) -> None:
        self.index = index
        self.pieces: list[str] = []
        self.place: dict[str, Any] = {"item_id": id_, "output_index": index}
        self._head = {"id": id_, **head}

    def _added(self, **members: Any) -> Event:
        item = {**self._head, **members}
        return "response.output_item.added", {"output_index": self.index, "item": item}

    def _done(self, item: Item) -> Event:
        return "response.output_item.done", {"output_index": self.index, "item": item}

    @abstractmethod
    def added(self) -> list[Event]:
        """Its first events."""

    @abstractmethod
    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """Its last events, and the whole item."""


class MessageOutput(OutputItem):
    """The answer's text."""

    def __init__(self, id_: str, index: int) -> None:
        super().__init__(id_, index, {"type": "message"})
        self.logprobs: list[dict[str, Any]] = []
        self.place["content_index"] = 0

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        return [
            self._added(status="in_progress", role="assistant", content=[]),
            ("response.content_part.added", {**self.place, "part": self._part("", [])}),
        ]

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        text = "".join(self.pieces)
        part = self._part(text, self.logprobs)
        item = {**self._head, "status": status, "role": "assistant", "content": [part]}
        return [
            ("response.output_text.done", {**self.place, "text": text, "logprobs": self.logprobs}),
            ("response.content_part.done", {**self.place, "part": part}),
            self._done(item),
        ], item

    @staticmethod
    def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ReasoningOutput(OutputItem):
    """What the model thinks. `encrypted`: the client asked for the form that it can send back."""

    def __init__(self, id_: str, index: int, *, encrypted: bool) -> None:
        super().__init__(id_, index, {"type": "reasoning"})
        self.place["content_index"] = 0
        self._encrypted = encrypted

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        return [
            self._added(status="in_progress", summary=[], content=[]),
            ("response.content_part.added", {**self.place, "part": self._part("")}),
        ]

    def grow(self, text: str) -> list[Event]:
        """More reasoning."""
        self.pieces.append(text)
        return [("response.reasoning_text.delta", {**self.place, "delta": text})]

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        text = "".join(self.pieces)
        part = self._part(text)
        item = {**self._head, "status": status, "summary": [], "content": [part]}
        if self._encrypted:
            item["encrypted_content"] = encode_opaque(text)
        return [
            ("response.reasoning_text.done", {**self.place, "text": text}),
            ("response.content_part.done", {**self.place, "part": part}),
            self._done(item),
        ], item

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class FunctionCallOutput(OutputItem):
    """A function call."""

    kind = "function_call"
    content = "arguments"
    """The member that the model writes."""

    def __init__(self, id_: str, index: int, call_id: str, name: str, namespace: str = "") -> None:
        head = {"type": self.kind, "call_id": call_id, "name": name}
        super().__init__(id_, index, head | {"namespace": namespace} if namespace else head)

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        return [self._added(**{self.content: ""}, status="in_progress")]

    def grow(self, text: str) -> list[Event]:
        """More of the arguments."""
        self.pieces.append(text)
        return [("response.function_call_arguments.delta", {**self.place, "delta": text})]

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        arguments = "".join(self.pieces)
        item = {**self._head, "arguments": arguments, "status": status}
        # openai 2 requires the name, openai 3 has no field for it.
        done_event = {**self.place, "name": self._head["name"], "arguments": arguments}
        return [("response.function_call_arguments.done", done_event), self._done(item)], item


class CustomCallOutput(FunctionCallOutput):
    """A call of a custom tool: the model writes its input as the one argument of a function.

    The input is sent in one piece, when the argument is complete.
    """

    kind = "custom_tool_call"
    content = "input"

    def grow(self, text: str) -> list[Event]:
        """More of the arguments."""
        self.pieces.append(text)
        return []

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        text = _custom_input("".join(self.pieces))
        item = {**self._head, "input": text, "status": status}
        return [
            ("response.custom_tool_call_input.delta", {**self.place, "delta": text}),
            ("response.custom_tool_call_input.done", {**self.place, "input": text}),
            self._done(item),
        ], item


def _custom_input(arguments: str) -> str:
    """The one argument; all of the arguments if the model wrote them in another form, or was cut off."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    value = decoded.get(CUSTOM_INPUT) if isinstance(decoded, dict) else None
    return value if isinstance(value, str) else arguments


# Items as they are stored and listed: with an id, a status and whole content parts.

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
OTHER: Final = "item"
"""Begins the ids of steps of tools that other servers ran."""

_WITHOUT_STATUS: Final = ("compaction", "item_reference")


def item_id(kind: str, owner: str, number: int | str) -> str:
    """The id of an item. It ends with the id of what owns it (without prefix) and its number there.

    So that the owner of a referenced item can be found: see `owner_of`.
    """
    return f"{_PREFIXES.get(kind, OTHER)}_{owner}_{number}"


def owner_of(item: str) -> str:
    """The owner in an item's id, empty if the id was not made here."""
    parts = item.split("_")
    return parts[1] if len(parts) == 3 else ""


def listed(items: Sequence[Item], owner: str) -> tuple[Item, ...]:
    """Items as they are stored and listed. Ids of clients are kept, others are `i0`, `i1`, … of `owner`."""
    return tuple(_listed(item, owner, index) for index, item in enumerate(items))


def _listed(item: Item, owner: str, index: int) -> Item:
    kind: str = item.get("type") or ("message" if "role" in item else "item_reference")
    raw_id = item.get("id")
    is_valid_id = isinstance(raw_id, str) and _ID.match(raw_id)
    full = {**item, "type": kind, "id": raw_id if is_valid_id else item_id(kind, owner, f"i{index}")}
    if kind not in _WITHOUT_STATUS:
        full["status"] = item.get("status") or "completed"
    if kind == "message":
        full["content"] = _parts(item)
    if kind == "reasoning":
        full["summary"] = item.get("summary") or []
    return full


def _parts(item: Item) -> list[dict[str, Any]]:
    content = item["content"]
    if not isinstance(content, str):
        return [_whole(part) for part in content]
    if item["role"] == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]


def _whole(part: dict[str, Any]) -> dict[str, Any]:
    """A content part with the members that clients of the API require."""
    if part["type"] == "output_text":
        return {"annotations": [], "logprobs": [], **part}
    if part["type"] == "input_image":
        return {**part, "detail": part.get("detail") or "auto"}
    return part


def text_characters(value: Any) -> int:
    """Characters of all strings in a value of JSON: encoded it has at least as many bytes. Nothing is encoded for it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(text_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(text_characters, value))
    return 0
