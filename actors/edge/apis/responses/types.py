"""Bodies of the Responses API, and their validation. `field_table` says what becomes of each field.

A rejected field is accepted in a value that changes nothing (`neutral`): official clients send some of them always.
"""

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from headwater.actors.edge.apis.responses.items import ITEMS_MAX, Item
from headwater.actors.edge.saga.fields import ReservedFields
from headwater.actors.http.errors import ApiError, bad_request

Treatment = Literal["served", "ignored", "rejected"]


class ResponseField(NamedTuple):
    """One field, and what becomes of it. `neutral`: values of a rejected one that change nothing, besides null."""

    field: str
    treatment: Treatment
    remark: str = ""
    neutral: tuple[Any, ...] = ()


CREATE_FIELDS: Final = (
    ResponseField("model", "served", "a model's name, alias or adapter"),
    ResponseField("input", "served", "a text, or items; media only by models that take them"),
    ResponseField(
        "instructions", "served", "the first system message; not carried over to the next response"
    ),
    ResponseField("previous_response_id", "served", "continues a stored response"),
    ResponseField("conversation", "served", "an id, or an object with it; excludes previous_response_id"),
    ResponseField("store", "served", "default true, where the edge stores responses"),
    ResponseField("stream", "served", "over WebSocket every response is streamed"),
    ResponseField("stream_options", "ignored", "include_obfuscation: streams are not padded"),
    ResponseField(
        "include", "served", "message.output_text.logprobs and reasoning.encrypted_content; others ignored"
    ),
    ResponseField(
        "tools", "served", "function and custom (plain text); hosted tools are rejected by their type"
    ),
    ResponseField("tool_choice", "served", "none, auto, required, function, custom and allowed_tools"),
    ResponseField("parallel_tool_calls", "served"),
    ResponseField("max_tool_calls", "served", "it limits hosted tools, of which there are none"),
    ResponseField("max_output_tokens", "served", "reasoning counts"),
    ResponseField("reasoning.effort", "served", "where the chat template has an effort"),
    ResponseField("reasoning.summary", "ignored", "reasoning is returned as it is, without summaries"),
    ResponseField("reasoning.context", "ignored", "the chat template decides which reasoning it shows"),
    ResponseField("reasoning.mode", "rejected", "", ("standard",)),
    ResponseField("text.format", "served", "text, json_object and json_schema, enforced"),
    ResponseField("text.verbosity", "ignored"),
    ResponseField("client_metadata", "ignored", "an agent's own notes on its session and turn"),
    ResponseField("temperature", "served"),
    ResponseField("top_p", "served"),
    ResponseField("top_logprobs", "served"),
    ResponseField("presence_penalty", "served", "as in chat completions"),
    ResponseField("frequency_penalty", "served", "as in chat completions"),
    ResponseField("truncation", "served", "auto drops the oldest items until the prompt fits the context"),
    ResponseField("metadata", "served", "at most 16 strings"),
    ResponseField("user", "served", "a routing hint"),
    ResponseField("safety_identifier", "served", "returned; a routing hint where user is left out"),
    ResponseField("prompt_cache_key", "served", "a routing hint: session affinity"),
    ResponseField(
        "prompt_cache_retention", "rejected", "blocks are evicted by use, not by age", ("in_memory",)
    ),
    ResponseField(
        "prompt_cache_options.mode", "rejected", "prefixes are cached automatically", ("implicit",)
    ),
    ResponseField("prompt_cache_options.ttl", "rejected", "blocks are evicted by use, not by age"),
    ResponseField("prompt_cache_options.prewarm", "rejected", "", (False,)),
    ResponseField("prompt_cache_options.comparison_response_id", "rejected"),
    ResponseField("service_tier", "ignored", "every response says default"),
    ResponseField("image.context_compression", "rejected", "", ("auto", "disabled")),
    ResponseField("background", "rejected", "responses do not outlive their request yet", (False,)),
    ResponseField("background_options", "rejected"),
    ResponseField("context_management", "rejected", "use POST /v1/responses/compact", ([],)),
    ResponseField("moderation", "rejected"),
    ResponseField("prompt", "rejected", "prompt templates are not stored here"),
    ResponseField("access_programs", "rejected"),
    ResponseField("cache_salt", "served", "Headwater's own: isolates cached prefixes"),
    ResponseField("priority", "served", "Headwater's own: lower is served first"),
)
"""Fields of POST /v1/responses, and of `response.create` over WebSocket."""

SOCKET_FIELDS: Final = (
    ResponseField("type", "served", "response.create; response.steer is rejected"),
    ResponseField("stream_id", "served", "responses of different streams run at the same time"),
    ResponseField("generate", "served", "false stores the input, so that the next request can refer to it"),
)
"""Further fields over WebSocket."""

COMPACT_FIELDS: Final = (
    ResponseField("model", "served"),
    ResponseField("input", "served"),
    ResponseField("instructions", "served", "given to the model that summarizes"),
    ResponseField("previous_response_id", "served"),
    ResponseField("prompt_cache_key", "served", "a routing hint: session affinity"),
    ResponseField("prompt_cache_retention", "ignored"),
    ResponseField("prompt_cache_options", "ignored"),
    ResponseField("service_tier", "ignored"),
    ResponseField("image", "ignored"),
)
"""Fields of POST /v1/responses/compact."""

_PROMPT: Final = (
    "model",
    "input",
    "instructions",
    "previous_response_id",
    "conversation",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "truncation",
)

COUNT_FIELDS: Final = (
    *(row for row in CREATE_FIELDS if row.field.partition(".")[0] in _PROMPT),
    ResponseField("personality", "ignored"),
)
"""Fields of POST /v1/responses/input_tokens."""


def ignored(rows: tuple[ResponseField, ...]) -> dict[str, str]:
    """Whole fields that are ignored, each with its remark."""
    return {row.field: row.remark for row in rows if row.treatment == "ignored" and "." not in row.field}


def rejected(rows: tuple[ResponseField, ...]) -> dict[str, tuple[Any, ...]]:
    """Whole fields that are rejected, each with its accepted values."""
    return {
        row.field: (None, *row.neutral)
        for row in rows
        if row.treatment == "rejected" and "." not in row.field
    }


# Types of bodies, and their parts.

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
OutputTokens = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
ShortText = Annotated[str, msgspec.Meta(max_length=512)]
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

    model: str
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: ObjectId | None = None
    conversation: ObjectId | ConversationId | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def conversation_id(self) -> str:
        """The id of the conversation, empty for none."""
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given or ""

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []


class CreateFields(InputFields, kw_only=True):
    """POST /v1/responses, and `response.create` over WebSocket."""

    store: bool | None = None
    stream: bool | None = None
    stream_options: Any = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    max_output_tokens: OutputTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    service_tier: Any = None
    client_metadata: Any = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    # Rejected unless neutral.
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    image: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt: Any = None
    access_programs: Any = None

    def includes(self, name: str) -> bool:
        """Return whether the client asked for a part of the output that is left out by default."""
        return name in (self.include or ())

    def check(self) -> None:
        """Raises `ApiError` 400 for the first field that cannot be served."""
        for row in CREATE_FIELDS:
            if row.treatment != "rejected":
                continue
            value = self._value(row.field)
            if value is not None and not any(value == neutral for neutral in row.neutral):
                reason = f": {row.remark}" if row.remark else "; leave it out"
                raise bad_request(
                    f"{row.field} is not supported{reason}.", param=row.field, code=_UNSUPPORTED
                )
        self.check_history()

    def check_history(self) -> None:
        """Raises `ApiError` 400 if the prompt has no source, or two histories."""
        if self.previous_response_id and self.conversation_id:
            raise bad_request(
                "previous_response_id and conversation exclude each other; send one of them.",
                param="previous_response_id",
                code="mutually_exclusive_parameters",
            )
        # An empty list with `generate` false prepares a conversation whose input comes later.
        if self.input in (None, "") and not (self.previous_response_id or self.conversation_id):
            raise missing("input")

    def _value(self, field: str) -> Any:
        name, _, inner = field.partition(".")
        value = getattr(self, name)
        if not inner:
            return value
        return value.get(inner) if isinstance(value, dict) else getattr(value, inner, None)


class CompactFields(ReservedFields, kw_only=True):
    """POST /v1/responses/compact."""

    model: str
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: ObjectId | None = None
    prompt_cache_key: ShortText | None = None


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
