"""Items in the form in which they are stored and listed: with an id, a status and whole content parts. Pure."""

import re
from collections.abc import Sequence
from typing import Any, Final

from headwater.actors.edge.api.responses.items.types import Item

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
    given = item.get("id")
    kept = isinstance(given, str) and _ID.match(given)
    full = {**item, "type": kind, "id": given if kept else item_id(kind, owner, f"i{index}")}
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
