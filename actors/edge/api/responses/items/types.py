"""Wire types of items: what a conversation consists of. They are accepted as input, stored, and returned.

An item that the edge stores or returns is a plain JSON object (`dict`); these types check it and read it.
"""

import re
from collections.abc import Iterable
from typing import Any, Final, Literal, cast

import msgspec

from headwater.actors.http.errors import ApiError, bad_request

Item = dict[str, Any]
"""An item as JSON."""

ITEMS_MAX: Final = 8_192
"""Items of one request."""

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputTextContent(msgspec.Struct, tag="input_text"):
    """Text of a user, a developer or a tool."""

    text: str


class OutputTextContent(msgspec.Struct, tag="output_text"):
    """Text of the model."""

    text: str


class PlainTextContent(msgspec.Struct, tag="text"):
    """Text, as items of conversations may spell it."""

    text: str


class RefusalContent(msgspec.Struct, tag="refusal"):
    """The model's refusal: an assistant's text like any other."""

    refusal: str


class InputImageContent(msgspec.Struct, tag="input_image"):
    """An image: a URL (https: or data:) or an uploaded file."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputFileContent(msgspec.Struct, tag="input_file"):
    """A file: its bytes, a URL or an upload."""

    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None


class InputAudioContent(msgspec.Struct, tag="input_audio"):
    """Audio: its base64 and encoding."""

    input_audio: dict[str, Any]


Content = (
    InputTextContent
    | OutputTextContent
    | PlainTextContent
    | RefusalContent
    | InputImageContent
    | InputFileContent
    | InputAudioContent
)


class MessageItem(msgspec.Struct, tag="message"):
    """A message. Without `id` it was not stored before."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(msgspec.Struct, tag="function_call"):
    """The model calls a function. `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutputItem(msgspec.Struct, tag="function_call_output"):
    """What the function returned."""

    call_id: str
    output: str | list[Content]
    id: str | None = None
    status: ItemStatus | None = None


class CustomToolCallItem(msgspec.Struct, tag="custom_tool_call"):
    """The model calls a tool whose input is plain text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None
    id: str | None = None
    status: ItemStatus | None = None


class CustomToolCallOutputItem(msgspec.Struct, tag="custom_tool_call_output"):
    """What that tool returned."""

    call_id: str
    output: str | list[Content]
    id: str | None = None
    status: ItemStatus | None = None


class ReasoningPiece(msgspec.Struct):
    """Reasoning, or a summary of it (`type`)."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """What the model thought. `encrypted_content` is `headwater.actors.edge.api.responses.items.opaque`'s, or a foreign one."""

    summary: list[ReasoningPiece] = []
    content: list[ReasoningPiece] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: ItemStatus | None = None


class CompactionItem(msgspec.Struct, tag="compaction"):
    """What `/v1/responses/compact` made of earlier items."""

    encrypted_content: str
    id: str | None = None


class AdditionalToolsItem(msgspec.Struct, tag="additional_tools"):
    """Tools that are offered from here on, in the form of the request's own."""

    tools: list[dict[str, Any]]
    id: str | None = None
    role: str | None = None


class EncryptedContent(msgspec.Struct, tag="encrypted_content"):
    """What one agent writes to another. The client marks it as encrypted; nothing here encrypts it, so it is the text itself."""

    encrypted_content: str


class AgentMessageItem(msgspec.Struct, tag="agent_message"):
    """A message of one of the client's agents to another: a task, or an answer."""

    content: list[InputTextContent | EncryptedContent]
    author: str | None = None
    recipient: str | None = None
    id: str | None = None


class ItemReference(msgspec.Struct, tag="item_reference"):
    """An item of a stored response, by its id."""

    id: str


AnyItem = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | ReasoningItem
    | CompactionItem
    | AdditionalToolsItem
    | AgentMessageItem
    | ItemReference
)

ITEM_TYPES: Final = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "compaction",
    "additional_tools",
    "agent_message",
    "item_reference",
)
CONTENT_TYPES: Final = (
    "input_text",
    "output_text",
    "text",
    "refusal",
    "input_image",
    "input_file",
    "input_audio",
)


_HOSTED: Final = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|mcp|local_shell|shell|apply_patch|tool_search)"
    r"_(call|call_output|list_tools|approval_request|approval_response)\Z"
)


def is_hosted(item: Item) -> bool:
    """Whether it is a step of a tool that another server ran: stored and listed, and no part of the prompt."""
    kind = item.get("type")
    return isinstance(kind, str) and _HOSTED.match(kind) is not None


def additional_tools(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The tools that these items offer. Raises `ApiError` 400."""
    found: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") == "additional_tools":
            read = read_item(item, "input")
            assert isinstance(read, AdditionalToolsItem)
            found += read.tools
    return found


def read_item(item: Item, param: str) -> AnyItem:
    """An item, checked. Raises `ApiError` 400 naming the place, never its value."""
    kind = item.get("type")
    if kind is None:
        # OpenAI's short form of a message, and of a reference.
        item = {**item, "type": "message" if "role" in item else "item_reference"}
    elif kind not in ITEM_TYPES:
        raise bad_request(
            f"{param}: items of type {_quoted(kind)} are not supported; supported are {', '.join(ITEM_TYPES)}.",
            param=f"{param}.type",
        )
    try:
        return cast(AnyItem, msgspec.convert(item, AnyItem))
    except msgspec.ValidationError as error:
        raise _invalid(item, param, error) from error


def _invalid(item: Item, param: str, error: msgspec.ValidationError) -> ApiError:
    content = item.get("content") or item.get("output")
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if item["type"] != "reasoning" and kind is not None and kind not in CONTENT_TYPES:
                where = f"{param}.content[{index}].type"
                return bad_request(
                    f"{where}: content of type {_quoted(kind)} is not supported; supported are "
                    f"{', '.join(CONTENT_TYPES)}.",
                    param=where,
                )
    message, _, where = str(error).partition(" - at `$")
    where = param + where.rstrip("`")
    return bad_request(f"{message} (at {where})", param=where)


def _quoted(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else "that is no string"
