"""What becomes of each field of the Responses API: served, ignored or rejected.

A rejected field is accepted in a value that changes nothing (`neutral`): official clients send some of them always.
"""

from typing import Any, Final, Literal, NamedTuple

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
