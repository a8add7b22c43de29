"""Wire types of Anthropic's Messages API that the edge accepts.

Annotations say of every field whether it is served, ignored or rejected. Unknown fields are ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec

from headwater.actors.edge.apis.chat_types import MESSAGES_MAX, Count, Probability, Salt, Temperature
from headwater.actors.edge.saga.fields import (
    NO_EFFECT,
    FieldRule,
    ReservedFields,
    ignored,
    refuse_rejected,
    refused_apart,
    rejected,
    served,
)
from headwater.actors.http.body import decode_body
from headwater.actors.http.errors import ApiError, bad_request

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


Messages = Annotated[
    list[InputMessage],
    msgspec.Meta(min_length=1, max_length=MESSAGES_MAX),
    served("roles user, assistant and system; an assistant's last text is continued"),
    served("adjacent text blocks are separated by a line break", "[].content[] text"),
    served("rejected by name for models that take text only", "[].content[] image"),
    served("plain text always; files by models that take them", "[].content[] document"),
    served("as text, without citations in the answer", "[].content[] search_result"),
    served("given to the chat template; `signature` is not verified", "[].content[] thinking"),
    ignored("only its author can read it", "[].content[] redacted_thinking"),
    served("", "[].content[] tool_use"),
    served("`is_error` puts `Error: ` before the text", "[].content[] tool_result"),
    refused_apart("", "[].content[] of server tools"),
]
Tools = Annotated[
    Annotated[list[ToolDefinition], msgspec.Meta(max_length=TOOLS_MAX)] | None,
    served("name, description, input_schema, strict"),
    ignored(part="[].input_examples"),
    ignored("arguments are always streamed as they come", "[].eager_input_streaming"),
    refused_apart("if true: needs Anthropic's tool search", "[].defer_loading"),
    refused_apart("without direct: needs Anthropic's code execution", "[].allowed_callers"),
    refused_apart("Anthropic's own tools, such as web_search_20250305", "[] of other types"),
]


class PromptFields(ReservedFields, kw_only=True):
    """The fields that make up a prompt: those of count_tokens."""

    IGNORED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("context_management", "speed", "user_profile_id", "workspace_id"), NO_EFFECT
    )

    model: Annotated[str, served("a model's name, alias or adapter")]
    messages: Messages
    system: Annotated[
        str | list[SystemBlock] | None,
        served("without Claude Code's billing header, which differs in every request"),
    ] = None
    tools: Tools = None
    tool_choice: Annotated[
        ToolChoiceField | None, served("auto, any, tool, none, disable_parallel_tool_use")
    ] = None
    thinking: Annotated[
        ThinkingConfig | None,
        served("without it the chat template decides; display omitted leaves out the text"),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        served("where the chat template has an effort", ".effort"),
        served("a JSON schema, enforced", ".format"),
    ] = None
    cache_control: Annotated[
        CacheControl | None, ignored("here and in blocks and tools: prefixes are cached automatically")
    ] = None
    mcp_servers: Annotated[Any, rejected([])] = None
    container: Annotated[Any, rejected()] = None
    inference_geo: Annotated[Any, rejected("global")] = None


class MessagesRequest(PromptFields, kw_only=True):
    """POST /v1/messages."""

    IGNORED: ClassVar[Mapping[str, str]] = {
        **PromptFields.IGNORED,
        "service_tier": "every answer says standard",
        "diagnostics": NO_EFFECT,
    }

    max_tokens: Annotated[
        Count, served("at least 1; a larger value than the context leaves room for is reduced")
    ]
    stream: bool | None = None
    stop_sequences: Annotated[list[str] | None, served("at most 16")] = None
    temperature: Annotated[Temperature | None, served("from 0 to 2, in every version of the API")] = None
    top_p: Probability | None = None
    top_k: Annotated[Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None, served("0 for all tokens")] = None
    metadata: Annotated[RequestMetadata | None, served("a routing hint, as OpenAI's user", ".user_id")] = None
    cache_salt: Annotated[Salt | None, served("Headwater's own: isolates cached prefixes")] = None


class CountTokensRequest(PromptFields, kw_only=True):
    """POST /v1/messages/count_tokens."""


Fields = TypeVar("Fields", bound=PromptFields)

HEADERS: Final[Mapping[str, FieldRule]] = {
    "x-api-key": served("or `Authorization: Bearer`"),
    "anthropic-version": served(
        "all versions up to 2026-10-21, and none, get the same format; rejected if it is no date"
    ),
    "anthropic-beta": ignored(),
}


class TokenCount(msgspec.Struct):
    """The answer of count_tokens: tokens of the prompt with system, tools and the chat template's own."""

    input_tokens: int


def decode_fields(kind: type[Fields], body: bytes) -> Fields:
    """Read and check a request. Raises `ApiError` 400 naming the field."""
    try:
        request = decode_body(kind, body)
    except ApiError as error:
        if (error.param or "").endswith("].type") and "Invalid value" in str(error):
            raise bad_request(
                f"{error}: blocks of server tools and of unknown types are not served; content is text, image,"
                " document, search_result, thinking, redacted_thinking, tool_use and tool_result.",
                param=error.param,
            ) from error
        raise
    refuse_rejected(request)
    return request
