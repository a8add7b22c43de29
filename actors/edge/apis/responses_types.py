"""Bodies of the Responses API, and their validation. Annotations say what becomes of each field.

A rejected field is accepted in a value that changes nothing: official clients send some of them always.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from headwater.actors.edge.apis.chat_types import (
    Count,
    Logprobs,
    Penalty,
    Priority,
    Probability,
    Salt,
    Temperature,
)
from headwater.actors.edge.apis.responses_items import ITEMS_MAX, Item
from headwater.actors.edge.saga.fields import (
    NO_EFFECT,
    ReservedFields,
    ignored,
    refuse_rejected,
    rejected,
    served,
)
from headwater.actors.http.errors import ApiError, bad_field, bad_request

ShortText = Annotated[str, msgspec.Meta(max_length=512)]
SessionKey = Annotated[ShortText | None, served("a routing hint: session affinity")]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, ShortText], msgspec.Meta(max_length=16)]
InputItems = Annotated[list[Item], msgspec.Meta(max_length=ITEMS_MAX)]
ObjectId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$")]

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"


class ConversationId(msgspec.Struct):
    """A conversation, by its id."""

    id: ObjectId


class ReasoningOptions(msgspec.Struct):
    """How much the model thinks. `generate_summary` is `summary`'s former name."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Any = None
    mode: Any = None


class TextFormat(msgspec.Struct, rename={"json_schema": "schema"}):
    """What the answer must conform to. `json_schema` is a JSON schema, as `schema` on the wire."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    json_schema: Any = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class InputFields(ReservedFields, kw_only=True):
    """What makes the prompt. Null is the same as leaving a field out."""

    IGNORED: ClassVar[Mapping[str, str]] = {"personality": NO_EFFECT}

    model: Annotated[str, served("a model's name, alias or adapter")]
    input: Annotated[
        str | InputItems | None, served("a text, or items; media only by models that take them")
    ] = None
    instructions: Annotated[
        str | None, served("the first system message; not carried over to the next response")
    ] = None
    previous_response_id: Annotated[ObjectId | None, served("continues a stored response")] = None
    conversation: Annotated[
        ObjectId | ConversationId | None,
        served("an id, or an object with it; excludes previous_response_id"),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        served("function and custom (plain text); hosted tools are rejected by their type"),
    ] = None
    tool_choice: Annotated[Any, served("none, auto, required, function, custom and allowed_tools")] = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[
        ReasoningOptions | None,
        served("where the chat template has an effort", ".effort"),
        ignored("reasoning is returned as it is, without summaries", ".summary"),
        ignored("the chat template decides which reasoning it shows", ".context"),
        rejected("standard", part=".mode"),
    ] = None
    text: Annotated[
        TextOptions | None,
        served("text, json_object and json_schema, enforced", ".format"),
        ignored(part=".verbosity"),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        served("auto drops the oldest items until the prompt fits the context"),
    ] = None

    @property
    def conversation_id(self) -> str:
        """The id of the conversation, empty for none."""
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationId) else conversation or ""

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []


class CreateFields(InputFields, kw_only=True):
    """POST /v1/responses, and `response.create` over WebSocket."""

    IGNORED: ClassVar[Mapping[str, str]] = {}

    store: Annotated[bool | None, served("default true, where the edge stores responses")] = None
    stream: Annotated[bool | None, served("over WebSocket every response is streamed")] = None
    stream_options: Annotated[Any, ignored("include_obfuscation: streams are not padded")] = None
    include: Annotated[
        list[str] | None,
        served("message.output_text.logprobs and reasoning.encrypted_content; others ignored"),
    ] = None
    max_tool_calls: Annotated[int | None, served("it limits hosted tools, of which there are none")] = None
    max_output_tokens: Annotated[Count | None, served("reasoning counts")] = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Logprobs | None = None
    presence_penalty: Annotated[Penalty | None, served("as in chat completions")] = None
    frequency_penalty: Annotated[Penalty | None, served("as in chat completions")] = None
    metadata: Annotated[Metadata | None, served("at most 16 strings")] = None
    user: Annotated[ShortText | None, served("a routing hint")] = None
    safety_identifier: Annotated[
        ShortText | None, served("returned; a routing hint where user is left out")
    ] = None
    prompt_cache_key: SessionKey = None
    service_tier: Annotated[Any, ignored("every response says default")] = None
    client_metadata: Annotated[Any, ignored("an agent's own notes on its session and turn")] = None
    cache_salt: Annotated[Salt | None, served("Headwater's own: isolates cached prefixes")] = None
    priority: Annotated[Priority | None, served("Headwater's own: lower is served first")] = None
    prompt_cache_retention: Annotated[
        Any, rejected("in_memory", reason="blocks are evicted by use, not by age")
    ] = None
    prompt_cache_options: Annotated[
        Any,
        rejected("implicit", reason="prefixes are cached automatically", part=".mode"),
        rejected(reason="blocks are evicted by use, not by age", part=".ttl"),
        rejected(False, part=".prewarm"),
        rejected(part=".comparison_response_id"),
    ] = None
    image: Annotated[Any, rejected("auto", "disabled", part=".context_compression")] = None
    background: Annotated[Any, rejected(False, reason="responses do not outlive their request yet")] = None
    background_options: Annotated[Any, rejected()] = None
    context_management: Annotated[Any, rejected([], reason="use POST /v1/responses/compact")] = None
    moderation: Annotated[Any, rejected()] = None
    prompt: Annotated[Any, rejected(reason="prompt templates are not stored here")] = None
    access_programs: Annotated[Any, rejected()] = None

    def includes(self, name: str) -> bool:
        """Return whether the client asked for a part of the output that is left out by default."""
        return name in (self.include or ())

    def check(self) -> None:
        """Raises `ApiError` 400 for the first field that cannot be served."""
        refuse_rejected(self, "{field} is not supported; leave it out.", code=_UNSUPPORTED)
        self.check_history()

    def check_history(self) -> None:
        """Raises `ApiError` 400 if the prompt has no source, or two histories."""
        if self.previous_response_id and self.conversation_id:
            raise bad_field(
                "previous_response_id",
                "and conversation exclude each other; send one of them.",
                code="mutually_exclusive_parameters",
            )
        # An empty list with `generate` false prepares a conversation whose input comes later.
        if self.input in (None, "") and not (self.previous_response_id or self.conversation_id):
            raise missing("input")


class CompactFields(ReservedFields, kw_only=True):
    """POST /v1/responses/compact."""

    IGNORED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prompt_cache_retention", "prompt_cache_options", "service_tier", "image"), NO_EFFECT
    )

    model: str
    input: str | InputItems | None = None
    instructions: Annotated[str | None, served("given to the model that summarizes")] = None
    previous_response_id: ObjectId | None = None
    prompt_cache_key: SessionKey = None


class ConversationFields(msgspec.Struct):
    """POST /v1/conversations."""

    metadata: Metadata | None = None
    items: Annotated[list[Item], msgspec.Meta(max_length=20)] | None = None


class ConversationUpdate(msgspec.Struct):
    """POST /v1/conversations/{id}."""

    metadata: Metadata | None


class ConversationItems(msgspec.Struct):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=20)]


_UNSUPPORTED: Final = "unsupported_parameter"


def missing(param: str) -> ApiError:
    """400 for a required field."""
    return bad_request(
        f"Missing required parameter: {param}.", param=param, code="missing_required_parameter"
    )
