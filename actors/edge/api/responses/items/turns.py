"""Items to turns: the conversation as chat templates know it. Pure.

An item is one thing (a message, a call, a result); a turn is all of an assistant's reasoning, text and calls up to the next
message of another role.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headwater.actors.edge.api.responses.items.opaque import decode_opaque
from headwater.actors.edge.api.responses.items.types import (
    AgentMessageItem,
    AnyItem,
    CompactionItem,
    Content,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    EncryptedContent,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputAudioContent,
    InputFileContent,
    InputImageContent,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalContent,
    is_hosted,
    read_item,
)
from headwater.actors.edge.generation.messages.media_parts import audio_media, file_media
from headwater.actors.edge.generation.messages.turn import (
    MediaPart,
    Part,
    TextPart,
    ToolCall,
    Turn,
    joined_texts,
)
from headwater.actors.http.errors import bad_request

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
    calls = None if earlier is None else {item.get("call_id") for item in earlier if _is_call(item)}
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
            if isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem):
                self._check_call(item.call_id, param)
            self.turns.append(_other_turn(item, param))

    def _add_call(self, call: ToolCall) -> None:
        self._calls.append(call)
        if self._known_calls is not None:
            self._known_calls.add(call.id)

    def _check_call(self, call_id: str, param: str) -> None:
        if self._known_calls is not None and call_id not in self._known_calls:
            raise bad_request(
                f"{param}: no tool call with this call_id precedes its output.", param=f"{param}.call_id"
            )

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


def _is_call(item: Item) -> bool:
    return item.get("type") in ("function_call", "custom_tool_call")


def _other_turn(item: AnyItem, param: str) -> Turn:
    if isinstance(item, MessageItem):
        return Turn(role=item.role, parts=parts_of(item.content, param))
    if isinstance(item, AgentMessageItem):
        texts = [
            part.encrypted_content if isinstance(part, EncryptedContent) else part.text
            for part in item.content
        ]
        return Turn(role="user", parts=(TextPart("".join(texts)),))
    if isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem):
        return Turn(role="tool", call_id=item.call_id, parts=parts_of(item.output, param))
    if isinstance(item, CompactionItem):
        summary = decode_opaque(item.encrypted_content, f"{param}.encrypted_content")
        if summary is None:
            raise bad_request(
                f"{param}.encrypted_content was not made here: only Headwater's own compaction can be read.",
                param=f"{param}.encrypted_content",
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
            raise bad_request(f"{param} needs image_url or file_id.", param=param)
        return MediaPart(
            "image", param, url=part.image_url or "", file_id=part.file_id or "", detail=part.detail or ""
        )
    if isinstance(part, InputFileContent):
        if not (part.file_data or part.file_url or part.file_id):
            raise bad_request(f"{param} needs file_data, file_url or file_id.", param=param)
        return file_media(
            param, name=part.filename, data=part.file_data, url=part.file_url, file_id=part.file_id
        )
    if isinstance(part, InputAudioContent):
        return audio_media(part.input_audio, f"{param}.input_audio")
    return TextPart(part.refusal if isinstance(part, RefusalContent) else part.text)
