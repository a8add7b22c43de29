"""The formats, as data, by name."""

from collections.abc import Mapping
from typing import Final

from headwater.actors.edge.parsing.formats.forced import FORCED_CALL, FORCED_CALLS
from headwater.actors.edge.parsing.formats.json_objects import HERMES, LLAMA3_JSON
from headwater.actors.edge.parsing.formats.reasoning import THINK
from headwater.actors.edge.parsing.grammar.format import ReasoningFormat, ToolFormat

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "forced_call": FORCED_CALL,
    "forced_calls": FORCED_CALLS,
}

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": THINK,
}
