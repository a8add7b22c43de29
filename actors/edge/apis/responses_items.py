"""Items, of which a conversation of the Responses API consists: their wire types, and their translation into turns. Pure.

An item that the edge stores or returns is a plain JSON object (`dict`); these types check it and read it.

Reasoning and compactions are encoded, not encrypted: they contain nothing but the client's own conversation, and any edge can read them without
a key or a stored state. What others wrote (another server's encrypted reasoning) is not readable here.

An item is one thing (a message, a call, a result); a turn is all of an assistant's reasoning, text and calls up to the next
message of another role.
"""

import base64
import binascii
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, cast, get_args

import msgspec

from headwater.actors.edge.prompt.media import audio_media, file_media
from headwater.actors.edge.prompt.request import MediaPart, Part, TextPart, ToolCall, Turn, joined_texts
from headwater.actors.http.errors import ApiError, bad_field, bad_request

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


class CustomToolCallOutputItem(FunctionCallOutputItem, tag="custom_tool_call_output"):
    """What that tool returned."""


class ReasoningPiece(msgspec.Struct):
    """Reasoning, or a summary of it (`type`)."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """What the model thought. `encrypted_content` is `headwater.actors.edge.apis.responses_items`'s, or a foreign one."""

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


def _types_of(union: Any) -> tuple[str, ...]:
    return tuple(str(kind.__struct_config__.tag) for kind in get_args(union))


ITEM_TYPES: Final = _types_of(AnyItem)
CONTENT_TYPES: Final = _types_of(Content)
CALL_TYPES: Final = ("function_call", "custom_tool_call")

_HOSTED: Final = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|mcp|local_shell|shell|apply_patch|tool_search)"
    r"_(call|call_output|list_tools|approval_request|approval_response)\Z"
)


def is_hosted(item: Item) -> bool:
    """Return whether the item is a step of a tool that another server ran. Such items are stored and listed, but are not part of the prompt."""
    kind = item.get("type")
    return isinstance(kind, str) and _HOSTED.match(kind) is not None


def additional_tools(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The tools that these items offer. Raises `ApiError` 400."""
    tools: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") == "additional_tools":
            read = read_item(item, "input")
            assert isinstance(read, AdditionalToolsItem)
            tools += read.tools
    return tools


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
    return invalid_member(error, param)


def invalid_member(error: msgspec.ValidationError, param: str) -> ApiError:
    """400 for a member at fault of the object in the field `param`."""
    message, _, where = str(error).partition(" - at `$")
    where = param + where.rstrip("`")
    return bad_request(f"{message} (at {where})", param=where)


def _quoted(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else "that is no string"


# `encrypted_content`: text that a client keeps and sends back without understanding it.

_PREFIX: Final = "hw1."
TEXT_BYTES_MAX: Final = 8 * 1024 * 1024
"""A small body could otherwise expand to gigabytes."""


def encode_opaque(text: str) -> str:
    """A text as `encrypted_content`."""
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
    return _PREFIX + base64.urlsafe_b64encode(packed).decode()


def decode_opaque(content: str, param: str) -> str | None:
    """The text, None if it is not from Headwater. Raises `ApiError` 400 if it was damaged."""
    if not content.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(content[len(_PREFIX) :])
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, TEXT_BYTES_MAX)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, zlib.error, ValueError) as error:
        raise bad_field(param, "is damaged: send it as it was received.") from error


# Items to turns, the conversation as chat templates know it.

CUSTOM_INPUT: Final = "input"
"""The one argument of a custom tool, as the model sees it."""

NAMESPACE_END: Final = "__"


def offered_name(namespace: str, name: str) -> str:
    """The name under which the model sees a tool of a namespace: the same in every request, whatever else is offered."""
    return f"{namespace}{NAMESPACE_END}{name}"


SUMMARY_HEAD: Final = "Summary of the conversation before this message:\n\n"


def turns_of(
    items: Sequence[Item], param: str, instructions: str = "", earlier: Sequence[Item] | None = None
) -> tuple[Turn, ...]:
    """The turns of a conversation. Raises `ApiError` 400 naming the item. `param`: the field that holds the items.

    With `earlier`, what comes before, each result must belong to a call there or here.
    """
    calls = None
    if earlier is not None:
        calls = {item.get("call_id") for item in earlier if item.get("type") in CALL_TYPES}
    builder = _TurnBuilder(calls)
    if instructions:
        builder.turns.append(Turn(role="system", parts=(TextPart(instructions),)))
    for index, item in enumerate(items):
        if is_hosted(item) or item.get("type") == "additional_tools":
            continue
        where = f"{param}[{index}]"
        builder.add(read_item(item, where), where)
    builder.end_assistant()
    return tuple(builder.turns)


class _TurnBuilder:
    """Collects an assistant's items until another role follows."""

    def __init__(self, known_calls: set[Any] | None) -> None:
        self.turns: list[Turn] = []
        self._known_calls = known_calls
        self._reasoning: list[str] = []
        self._parts: tuple[Part, ...] = ()
        self._calls: list[ToolCall] = []

    def add(self, item: AnyItem, param: str) -> None:
        """Add the next item."""
        if isinstance(item, MessageItem) and item.role == "assistant":
            if self._parts or self._calls:
                self.end_assistant()
            self._parts = parts_of(item.content, param)
        elif isinstance(item, ReasoningItem):
            if self._parts or self._calls:
                self.end_assistant()
            self._reasoning.append(_reasoning_of(item, param))
        elif isinstance(item, FunctionCallItem):
            self._add_call(ToolCall(item.call_id, _called(item), item.arguments))
        elif isinstance(item, CustomToolCallItem):
            arguments = msgspec.json.encode({CUSTOM_INPUT: item.input}).decode()
            self._add_call(ToolCall(item.call_id, _called(item), arguments))
        else:
            self.end_assistant()
            known = self._known_calls
            if known is not None and isinstance(item, FunctionCallOutputItem) and item.call_id not in known:
                raise bad_request(
                    f"{param}: no tool call with this call_id precedes its output.", param=f"{param}.call_id"
                )
            self.turns.append(_other_turn(item, param))

    def _add_call(self, call: ToolCall) -> None:
        self._calls.append(call)
        if self._known_calls is not None:
            self._known_calls.add(call.id)

    def end_assistant(self) -> None:
        """End the assistant's turn, if it has begun. Reasoning that nothing followed is dropped: it was cut off."""
        if self._parts or self._calls:
            self.turns.append(
                Turn(
                    role="assistant",
                    parts=self._parts,
                    calls=tuple(self._calls),
                    reasoning="\n".join(text for text in self._reasoning if text),
                )
            )
        self._reasoning, self._parts, self._calls = [], (), []


def _called(item: FunctionCallItem | CustomToolCallItem) -> str:
    return offered_name(item.namespace, item.name) if item.namespace else item.name


def _other_turn(item: AnyItem, param: str) -> Turn:
    if isinstance(item, MessageItem):
        return Turn(role=item.role, parts=parts_of(item.content, param))
    if isinstance(item, AgentMessageItem):
        texts = [
            part.encrypted_content if isinstance(part, EncryptedContent) else part.text
            for part in item.content
        ]
        return Turn(role="user", parts=(TextPart("".join(texts)),))
    if isinstance(item, FunctionCallOutputItem):
        return Turn(role="tool", call_id=item.call_id, parts=parts_of(item.output, param))
    if isinstance(item, CompactionItem):
        summary = decode_opaque(item.encrypted_content, f"{param}.encrypted_content")
        if summary is None:
            raise bad_field(
                f"{param}.encrypted_content",
                "was not made here: only Headwater's own compaction can be read.",
            )
        return Turn(role="user", parts=(TextPart(SUMMARY_HEAD + summary),))
    raise bad_request(
        f"{param}: the referenced item is not stored here, or no longer; send the item itself.",
        param=f"{param}.id",
    )


def _reasoning_of(item: ReasoningItem, param: str) -> str:
    if item.content:
        return "".join(piece.text for piece in item.content)
    if item.encrypted_content:
        return decode_opaque(item.encrypted_content, f"{param}.encrypted_content") or ""
    return ""


def parts_of(content: str | list[Content], param: str) -> tuple[Part, ...]:
    """Parts of a message. Raises `ApiError` 400 for a medium without its bytes, URL or upload."""
    if isinstance(content, str):
        return (TextPart(content),)
    return joined_texts(_part_of(part, f"{param}.content[{index}]") for index, part in enumerate(content))


def _part_of(part: Content, param: str) -> Part:
    if isinstance(part, InputImageContent):
        if not part.image_url and not part.file_id:
            raise bad_field(param, "needs image_url or file_id.")
        return MediaPart(
            "image", param, url=part.image_url or "", file_id=part.file_id or "", detail=part.detail or ""
        )
    if isinstance(part, InputFileContent):
        if not (part.file_data or part.file_url or part.file_id):
            raise bad_field(param, "needs file_data, file_url or file_id.")
        return file_media(
            param, name=part.filename, data=part.file_data, url=part.file_url, file_id=part.file_id
        )
    if isinstance(part, InputAudioContent):
        return audio_media(part.input_audio, f"{param}.input_audio")
    return TextPart(part.refusal if isinstance(part, RefusalContent) else part.text)
