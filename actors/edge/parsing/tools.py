"""The tools that a request offers."""

from collections.abc import Mapping, Sequence
from typing import Any


def offered_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each tool's parameters, by name.

    Definitions may have the form of any API: with or without `function` around them, with `parameters` or
    `input_schema`.
    """
    offered: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters", function.get("input_schema"))
            offered[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return offered
