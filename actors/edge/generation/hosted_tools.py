"""Tools that an API's own servers would run, or that a client offers under a name whose meaning is the API's. Nothing here runs them. Pure."""

import re
from typing import Any, Final

OPENAI: Final = re.compile(
    r"(web_search|file_search|code_interpreter|computer|image_generation|mcp|local_shell|shell|apply_patch|tool_search)"
    r"(_preview|_use|_use_preview)?(_\d{4}_\d{2}_\d{2})?\Z"
)
"""Types of tools of OpenAI's APIs."""

ANTHROPIC: Final = re.compile(
    r"(web_search|web_fetch|code_execution|computer|bash|text_editor|memory|tool_search_tool_(regex|bm25)|mcp_toolset|advisor)"
    r"(_\d{8})?\Z"
)
"""Types of tools of Anthropic's API."""


def hosted_name(tool: Any, types: re.Pattern[str]) -> str:
    """The type of a tool that is not served here; empty for any other, also for one of an unknown type."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if isinstance(kind, str) and types.match(kind) else ""
