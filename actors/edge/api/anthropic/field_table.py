"""What becomes of each field of Anthropic's Messages API: served, ignored or rejected."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

Treatment = Literal["served", "ignored", "rejected"]


class FieldRow(NamedTuple):
    """One field, and what becomes of it."""

    field: str
    treatment: Treatment
    remark: str = ""

    @property
    def is_at_top(self) -> bool:
        """Whether it is a field of the body itself, and the row is about all of its values."""
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
