"""The formats, as data, by name."""

from collections.abc import Mapping
from typing import Final

from headwater.actors.edge.parsing.formats import (
    forced,
    headers,
    json_objects,
    markup,
    markup_families,
    other,
    reasoning,
)
from headwater.actors.edge.parsing.grammar.format import ReasoningFormat, ToolFormat

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": json_objects.HERMES,
    "llama3_json": json_objects.LLAMA3_JSON,
    "pythonic": other.PYTHONIC,
    "mistral": headers.MISTRAL,
    "deepseek_v3": headers.DEEPSEEK_V3,
    "deepseek_v31": headers.DEEPSEEK_V31,
    "deepseek_v32": markup.DEEPSEEK_V32,
    "qwen3_coder": markup.QWEN3_CODER,
    "glm": markup.GLM,
    "kimi_k2": headers.KIMI_K2,
    "kimi_k3": markup.KIMI_K3,
    "minimax_m2": markup.MINIMAX_M2,
    "gemma4": other.GEMMA4,
    "harmony": other.HARMONY,
    "apertus": json_objects.APERTUS,
    "cohere_command": json_objects.COHERE_COMMAND,
    "dots": markup_families.DOTS,
    "functiongemma": other.FUNCTIONGEMMA,
    "gigachat3": json_objects.GIGACHAT3,
    "granite": json_objects.GRANITE,
    "granite-20b-fc": json_objects.GRANITE_20B_FC,
    "hunyuan": markup_families.HUNYUAN,
    "internlm": json_objects.INTERNLM,
    "jamba": json_objects.JAMBA,
    "k2_horizon": markup_families.K2_HORIZON,
    "lfm2": other.LFM2,
    "longcat": json_objects.LONGCAT,
    "mimo": markup.MIMO,
    "phi4_mini_json": json_objects.PHI4_MINI,
    "plamo3": headers.PLAMO3,
    "seed_oss": markup.SEED_OSS,
    "step3": markup_families.STEP3,
    "xlam": json_objects.XLAM,
    "forced_call": forced.FORCED_CALL,
    "forced_calls": forced.FORCED_CALLS,
}

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": reasoning.THINK,
    "think_opened": reasoning.THINK_OPENED,
    "mistral": reasoning.MISTRAL_THINK,
    "gemma4": reasoning.GEMMA4_THOUGHT,
    "kimi_k3": reasoning.KIMI_K3_THINK,
    "harmony": reasoning.HARMONY_ANALYSIS,
    "apertus": reasoning.APERTUS_INNER,
    "cohere_command": reasoning.COHERE_THINKING,
    "ernie45": reasoning.ERNIE45_THINK,
    "granite": reasoning.GRANITE_THOUGHT,
    "hunyuan": reasoning.HUNYUAN_THINK,
    "hunyuan_a13b": reasoning.HUNYUAN_A13B_THINK,
    "k2_horizon": reasoning.K2_HORIZON_THINK,
    "kimi": reasoning.KIMI_THINK,
    "plamo3": reasoning.PLAMO3_THINK,
    "seed_oss": reasoning.SEED_THINK,
}
