"""The formats, as data, by name."""

from collections.abc import Mapping
from typing import Final

from headwater.actors.edge.parsing.formats.forced import FORCED_CALL, FORCED_CALLS
from headwater.actors.edge.parsing.formats.headers import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL
from headwater.actors.edge.parsing.formats.json_objects import HERMES, LLAMA3_JSON
from headwater.actors.edge.parsing.formats.markup import DEEPSEEK_V32, GLM, KIMI_K3, MINIMAX_M2, QWEN3_CODER
from headwater.actors.edge.parsing.formats.other import GEMMA4, HARMONY, PYTHONIC
from headwater.actors.edge.parsing.formats.reasoning import (
    GEMMA4_THOUGHT,
    HARMONY_ANALYSIS,
    KIMI_K3_THINK,
    MISTRAL_THINK,
    THINK,
    THINK_OPENED,
)
from headwater.actors.edge.parsing.grammar.format import ReasoningFormat, ToolFormat

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "minimax_m2": MINIMAX_M2,
    "gemma4": GEMMA4,
    "harmony": HARMONY,
    "forced_call": FORCED_CALL,
    "forced_calls": FORCED_CALLS,
}

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": THINK,
    "think_opened": THINK_OPENED,
    "mistral": MISTRAL_THINK,
    "gemma4": GEMMA4_THOUGHT,
    "kimi_k3": KIMI_K3_THINK,
    "harmony": HARMONY_ANALYSIS,
}
