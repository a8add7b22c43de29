"""Wire types of Anthropic's Messages API that the edge accepts.

`field_table` says of every field whether it is served, ignored or rejected. Unknown fields are ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, cast

import msgspec

from headwater.actors.edge.apis.openai.types import (
    MESSAGES_MAX,
    Count,
    Probability,
    Salt,
    Temperature,
)
from headwater.actors.edge.saga.fields import ReservedFields
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import ApiError, bad_request

Treatment = Literal["served", "ignored", "rejected"]


class FieldRow(NamedTuple):
    """One field, and what becomes of it."""

    field: str
    treatment: Treatment
    remark: str = ""

    @property
    def is_at_top(self) -> bool:
        """Return whether this is a field of the body itself, and the row is about all of its values."""
        return self.field.isidentifier()


PROMPT_FIELDS: Final = (
    FieldRow("model", "served", "a model's name, alias or adapter"),
    FieldRow("messages", "served", "roles user, assistant and system; an assistant's last text is continued"),
    FieldRow("messages[].content[] text", "served", "adjacent text blocks are separated by a line break"),
    FieldRow("messages[].content[] image", "served", "rejected by name for models that take text only"),
    FieldRow("messages[].content[] document", "served", "plain text always; files by models that take them"),
    FieldRow("messages[].content[] search_result", "served", "as text, without citations in the answer"),
    FieldRow(
        "messages[].content[] thinking", "served", "given to the chat template; `signature` is not verified"
    ),
    FieldRow("messages[].content[] redacted_thinking", "ignored", "only its author can read it"),
    FieldRow("messages[].content[] tool_use", "served"),
    FieldRow("messages[].content[] tool_result", "served", "`is_error` puts `Error: ` before the text"),
    FieldRow("messages[].content[] of server tools", "rejected"),
    FieldRow("system", "served", "without Claude Code's billing header, which differs in every request"),
    FieldRow("tools[] custom", "served", "name, description, input_schema, strict"),
    FieldRow("tools[].input_examples", "ignored"),
    FieldRow("tools[].eager_input_streaming", "ignored", "arguments are always streamed as they come"),
    FieldRow("tools[].defer_loading", "rejected", "if true: needs Anthropic's tool search"),
    FieldRow("tools[].allowed_callers", "rejected", "without direct: needs Anthropic's code execution"),
    FieldRow("tools[] of other types", "rejected", "Anthropic's own tools, such as web_search_20250305"),
    FieldRow("tool_choice", "served", "auto, any, tool, none, disable_parallel_tool_use"),
    FieldRow(
        "thinking", "served", "without it the chat template decides; display omitted leaves out the text"
    ),
    FieldRow("output_config.effort", "served", "where the chat template has an effort"),
    FieldRow("output_config.format", "served", "a JSON schema, enforced"),
    FieldRow("cache_control", "ignored", "here and in blocks and tools: prefixes are cached automatically"),
    FieldRow("container", "rejected"),
    FieldRow("inference_geo", "rejected", "unless global"),
    FieldRow("mcp_servers", "rejected", "unless empty"),
    FieldRow("context_management", "ignored"),
    FieldRow("speed", "ignored"),
    FieldRow("user_profile_id", "ignored"),
    FieldRow("workspace_id", "ignored"),
)

ANSWER_FIELDS: Final = (
    FieldRow(
        "max_tokens", "served", "at least 1; a larger value than the context leaves room for is reduced"
    ),
    FieldRow("stream", "served"),
    FieldRow("stop_sequences", "served", "at most 16"),
    FieldRow("temperature", "served", "from 0 to 2, in every version of the API"),
    FieldRow("top_p", "served"),
    FieldRow("top_k", "served", "0 for all tokens"),
    FieldRow("metadata.user_id", "served", "a routing hint, as OpenAI's user"),
    FieldRow("service_tier", "ignored", "every answer says standard"),
    FieldRow("diagnostics", "ignored"),
    FieldRow("cache_salt", "served", "Headwater's own: isolates cached prefixes"),
)

HEADERS: Final = (
    FieldRow("x-api-key", "served", "or `Authorization: Bearer`"),
    FieldRow(
        "anthropic-version",
        "served",
        "all versions up to 2026-10-21, and none, get the same format; rejected if it is no date",
    ),
    FieldRow("anthropic-beta", "ignored"),
)


def _ignored(*tables: tuple[FieldRow, ...]) -> dict[str, str]:
    rows = [row for table in tables for row in table if row.treatment == "ignored" and row.is_at_top]
    return {row.field: row.remark or "without effect here" for row in rows}


IGNORED_IN_PROMPTS: Final[Mapping[str, str]] = _ignored(PROMPT_FIELDS)
IGNORED_IN_MESSAGES: Final[Mapping[str, str]] = _ignored(PROMPT_FIELDS, ANSWER_FIELDS)

REJECTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "mcp_servers": (None, []),
    "container": (None,),
    "inference_geo": (None, "global"),
}
"""Fields that would change the answer, and their values that mean the same as leaving them out."""


# Types of bodies, and their parts.

TOOLS_MAX: Final = 1_024
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
BlockId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class CacheControl(msgspec.Struct):
    """A breakpoint of Anthropic's prompt cache. Accepted and ignored: caching of prefixes is automatic."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Base64Source(msgspec.Struct, tag="base64"):
    """A file inside the request."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag="url"):
    """A file on a server."""

    url: str


class FileSource(msgspec.Struct, tag="file"):
    """An uploaded file."""

    file_id: str


class PlainTextSource(msgspec.Struct, tag="text"):
    """A document as plain text."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


ImageSource = Base64Source | UrlSource | FileSource
DocumentSource = Base64Source | UrlSource | FileSource | PlainTextSource


class TextBlock(msgspec.Struct, tag="text"):
    """Text. `citations` of earlier answers are ignored."""

    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class SystemBlock(msgspec.Struct):
    """A text block of the system prompt. Not tagged: msgspec would take one without its type, as there is one kind only."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class ImageBlock(msgspec.Struct, tag="image"):
    """An image."""

    source: ImageSource
    cache_control: CacheControl | None = None


class DocumentBlock(msgspec.Struct, tag="document"):
    """A document: a PDF, or plain text. `title` and `context` precede plain text."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(msgspec.Struct, tag="search_result"):
    """A search result that the client found: its title, source and texts are part of the prompt."""

    source: str
    title: str
    content: list[TextBlock]
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Thinking of an earlier answer. Its `signature` is not verified: conversations may begin at another server."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Encrypted thinking of another server; ignored."""

    data: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call of an earlier answer."""

    id: BlockId
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolReferenceBlock(msgspec.Struct, tag="tool_reference"):
    """A tool that a client's search found: its definition is in the prompt from then on."""

    tool_name: str
    cache_control: CacheControl | None = None


ResultContent = ToolReferenceBlock | TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a call returned."""

    tool_use_id: BlockId
    content: str | list[ResultContent] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class InputMessage(msgspec.Struct):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    """A function that the model may call, and that the client runs. Tools with another `type` than custom are rejected."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: Any = None
    eager_input_streaming: bool | None = None


class ToolChoiceField(msgspec.Struct):
    """auto: the model decides; any: at least one call; tool: exactly the tool `name`; none: no call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """The client's setting of whether the model thinks before it answers. With `display` "omitted", thinking blocks have no text."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """A JSON schema that the answer conforms to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Effort of the model, and the format of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct):
    """`user_id`: an opaque id of the client's user."""

    user_id: Annotated[str, msgspec.Meta(max_length=512)] | None = None


class PromptFields(ReservedFields, kw_only=True):
    """The fields that make up a prompt: those of count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[SystemBlock] | None = None
    tools: Annotated[list[ToolDefinition], msgspec.Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Any = None
    container: Any = None
    inference_geo: Any = None

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` 400 for the first field that would change the answer and is not served."""
        for name, neutral in REJECTED.items():
            if getattr(self, name) not in neutral:
                raise bad_request(f"{name} is not supported by this release; leave it out.", param=name)


class MessagesRequest(PromptFields, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    metadata: RequestMetadata | None = None
    # Headwater's own, as in the OpenAI API.
    cache_salt: Salt | None = None


class CountTokensRequest(PromptFields, kw_only=True):
    """POST /v1/messages/count_tokens."""


class TokenCount(msgspec.Struct):
    """The answer of count_tokens: tokens of the prompt with system, tools and the chat template's own."""

    input_tokens: int


_messages = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountTokensRequest)


def decode_messages(body: bytes) -> MessagesRequest:
    """Read and check a request. Raises `ApiError` 400 naming the field."""
    return cast(MessagesRequest, _decode(_messages, body))


def decode_count(body: bytes) -> CountTokensRequest:
    """Read and check a request to count tokens. Raises `ApiError` 400 naming the field."""
    return cast(CountTokensRequest, _decode(_count, body))


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> PromptFields:
    try:
        request: PromptFields = decode_body(decoder, body)
    except ApiError as error:
        if (error.param or "").endswith("].type") and "Invalid value" in str(error):
            raise bad_request(
                f"{error}: blocks of server tools and of unknown types are not served; content is text, image,"
                " document, search_result, thinking, redacted_thinking, tool_use and tool_result.",
                param=error.param,
            ) from error
        raise
    request.refuse_unsupported()
    return request
