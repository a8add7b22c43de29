"""Output items while they are generated: each knows its own events. Pure.

An item is added, gets its content in deltas, and is done; what is done is what the whole response contains.
"""

from typing import Any, Final, Literal, Protocol

import msgspec

from headwater.actors.edge.api.responses.items.opaque import encode_opaque
from headwater.actors.edge.api.responses.items.turns import CUSTOM_INPUT
from headwater.actors.edge.api.responses.items.types import Item
from headwater.actors.edge.generation.events import TokenDetail

Event = tuple[str, dict[str, Any]]
"""An event's type, and its members without `type` and `sequence_number`."""

Ending = Literal["completed", "incomplete"]

LOGPROB_MIN: Final = -9999.0
"""JSON has no infinity."""


class TokenNames(Protocol):
    """A tokenizer's names of tokens."""

    def text_of(self, token: int) -> str:
        """A token as text."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """A token as bytes."""
        ...


class OutputItem(Protocol):
    """An item that is being generated."""

    index: int

    def added(self) -> list[Event]:
        """Its first events."""
        ...

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """Its last events, and the whole item."""
        ...


def logprob_entries(names: TokenNames, detail: TokenDetail) -> list[dict[str, Any]]:
    """Log probabilities of a piece of text, one entry per token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names.text_of(token),
            "logprob": max(logprob, LOGPROB_MIN),
            "bytes": list(names.bytes_of(token)),
        }

    return [
        {**entry(token, item.logprob), "top_logprobs": [entry(other, value) for other, value in item.top]}
        for token, item in zip(detail.tokens, detail.logprobs, strict=False)
    ]


class MessageOutput:
    """The answer's text."""

    def __init__(self, id_: str, index: int) -> None:
        self.index = index
        self.logprobs: list[dict[str, Any]] = []
        self.pieces: list[str] = []
        self.place: dict[str, Any] = {"item_id": id_, "output_index": index, "content_index": 0}
        self._id = id_

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        return [
            (
                "response.output_item.added",
                {"output_index": self.index, "item": self._item([], "in_progress")},
            ),
            ("response.content_part.added", {**self.place, "part": self._part("", [])}),
        ]

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        text = "".join(self.pieces)
        part = self._part(text, self.logprobs)
        item = self._item([part], status)
        return [
            ("response.output_text.done", {**self.place, "text": text, "logprobs": self.logprobs}),
            ("response.content_part.done", {**self.place, "part": part}),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ], item

    def _item(self, content: list[dict[str, Any]], status: str) -> Item:
        return {
            "id": self._id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    @staticmethod
    def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ReasoningOutput:
    """What the model thinks. `encrypted`: the client asked for the form that it can send back."""

    def __init__(self, id_: str, index: int, *, encrypted: bool) -> None:
        self.index = index
        self._id = id_
        self._encrypted = encrypted
        self._pieces: list[str] = []
        self._place: dict[str, Any] = {"item_id": id_, "output_index": index, "content_index": 0}

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        return [
            (
                "response.output_item.added",
                {"output_index": self.index, "item": self._item([], "in_progress")},
            ),
            ("response.content_part.added", {**self._place, "part": self._part("")}),
        ]

    def grow(self, text: str) -> list[Event]:
        """More reasoning."""
        self._pieces.append(text)
        return [("response.reasoning_text.delta", {**self._place, "delta": text})]

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        text = "".join(self._pieces)
        item = self._item([self._part(text)], status)
        if self._encrypted:
            item["encrypted_content"] = encode_opaque(text)
        return [
            ("response.reasoning_text.done", {**self._place, "text": text}),
            ("response.content_part.done", {**self._place, "part": self._part(text)}),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ], item

    def _item(self, content: list[dict[str, Any]], status: str) -> Item:
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": content}

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class FunctionCallOutput:
    """A function call."""

    def __init__(self, id_: str, index: int, call_id: str, name: str, namespace: str = "") -> None:
        self.index = index
        self._head = {"id": id_, "type": "function_call", "call_id": call_id, "name": name}
        if namespace:
            self._head["namespace"] = namespace
        self._pieces: list[str] = []
        self._place: dict[str, Any] = {"item_id": id_, "output_index": index}

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        item = {**self._head, "arguments": "", "status": "in_progress"}
        return [("response.output_item.added", {"output_index": self.index, "item": item})]

    def grow(self, text: str) -> list[Event]:
        """More of the arguments."""
        self._pieces.append(text)
        return [("response.function_call_arguments.delta", {**self._place, "delta": text})]

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        arguments = "".join(self._pieces)
        item = {**self._head, "arguments": arguments, "status": status}
        # openai 2 requires the name, openai 3 has no field for it.
        whole = {**self._place, "name": self._head["name"], "arguments": arguments}
        return [
            ("response.function_call_arguments.done", whole),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ], item


class CustomCallOutput:
    """A call of a custom tool: the model writes its input as the one argument of a function.

    The input is sent in one piece, when the argument is complete.
    """

    def __init__(self, id_: str, index: int, call_id: str, name: str, namespace: str = "") -> None:
        self.index = index
        self._head = {"id": id_, "type": "custom_tool_call", "call_id": call_id, "name": name}
        if namespace:
            self._head["namespace"] = namespace
        self._pieces: list[str] = []
        self._place: dict[str, Any] = {"item_id": id_, "output_index": index}

    def added(self) -> list[Event]:
        """See `OutputItem.added`."""
        item = {**self._head, "input": "", "status": "in_progress"}
        return [("response.output_item.added", {"output_index": self.index, "item": item})]

    def grow(self, text: str) -> list[Event]:
        """More of the arguments."""
        self._pieces.append(text)
        return []

    def finished(self, status: Ending) -> tuple[list[Event], Item]:
        """See `OutputItem.finished`."""
        text = _custom_input("".join(self._pieces))
        item = {**self._head, "input": text, "status": status}
        return [
            ("response.custom_tool_call_input.delta", {**self._place, "delta": text}),
            ("response.custom_tool_call_input.done", {**self._place, "input": text}),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ], item


def _custom_input(arguments: str) -> str:
    """The one argument; all of the arguments if the model wrote them in another form, or was cut off."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    value = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return value if isinstance(value, str) else arguments
