"""The names of parsers: our own formats, and those that vLLM and SGLang give to the same formats.

Written against vLLM 0.32 (`--tool-call-parser`, `--reasoning-parser`) and SGLang 0.5.23 (the same flags).
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Final

from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

NONE: Final = "none"
"""Switches a parser off."""

RESPONSE_TEMPLATE: Final = "response_template"
"""The format that a model's own `response_template` describes."""

FORCED: Final = ("forced_call", "forced_calls")
"""Formats of requests, not of models."""

TOOL_ALIASES: Final[Mapping[str, str]] = {
    # vLLM
    "deepseek_v4": "deepseek_v32",
    "deepseek_v41": "deepseek_v32",
    "glm45": "glm",
    "glm47": "glm",
    "ling3": "glm",
    "hf": RESPONSE_TEMPLATE,
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "olmo3": "pythonic",
    "openai": "harmony",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "apertus2509": "apertus",
    "ernie45": "hermes",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "hy_v3": "hunyuan",
    "poolside_v1": "glm",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    # SGLang
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "deepseekv41": "deepseek_v32",
    "gpt-oss": "harmony",
    "interns1": "internlm",
    "llama3": "llama3_json",
    "minimax-m2": "minimax_m2",
    "nanbeige": "qwen3_coder",
    "qwen": "hermes",
    "qwen25": "hermes",
}

REASONING_ALIASES: Final[Mapping[str, str]] = {
    # vLLM
    "deepseek_r1": "think_opened",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "deepseek_v41": "think",
    "glm45": "think",
    "glm47": "think",
    "hf": RESPONSE_TEMPLATE,
    "holo2": "think",
    "kimi_k2": "think",
    "ling3": "think",
    "mimo": "think",
    "minimax_m2": "think",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai_gptoss": "harmony",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "granite_thinking_parser": "think",
    "hy_v3": "hunyuan",
    "minicpmv": "think",
    "poolside_v1": "think",
    "qwen3": "think",
    "step3p5": "think",
    # SGLang
    "deepseek-r1": "think_opened",
    "deepseek-v3": "think",
    "deepseek-v4": "think",
    "deepseek-v41": "think",
    "apertus2509": "apertus",
    "dots": "think",
    "gigachat35": "think_opened",
    "gpt-oss": "harmony",
    "interns1": "think",
    "minimax": "think",
    "nanbeige": "think",
    "nemotron_3": "think",
    "qwen3-thinking": "think",
    "step3": "think_opened",
}

TOOL_UNSUPPORTED: Final = frozenset(
    {
        *("hy_v4", "inkling", "minimax_m3", "muse_glimmer"),
        *("beam", "gigachat35", "iquest_q1", "minimax-m3", "muse", "spark25", "trinity"),
    }
)
"""Names of vLLM and SGLang for formats that are missing here."""

REASONING_UNSUPPORTED: Final = frozenset(
    {
        *("hy_v4", "inkling", "minimax_m2_append_think", "minimax_m3", "muse_glimmer"),
        *("beam", "iquest_q1", "minimax-append-think", "minimax-m3", "muse"),
    }
)


class UnknownParser(ValueError):
    """There is no parser of this name."""


def tool_format_of(name: str) -> str:
    """Return the tool format that `name` means, "" for `none`. Raises `UnknownParser`."""
    formats = {*TOOL_FORMATS, RESPONSE_TEMPLATE} - set(FORCED)
    return _format_of("--tool-parser", name, formats, TOOL_ALIASES, TOOL_UNSUPPORTED)


def reasoning_format_of(name: str) -> str:
    """Return the reasoning format that `name` means, "" for `none`. Raises `UnknownParser`."""
    formats = {*REASONING_FORMATS, RESPONSE_TEMPLATE}
    return _format_of("--reasoning-parser", name, formats, REASONING_ALIASES, REASONING_UNSUPPORTED)


def _format_of(
    flag: str, name: str, formats: Collection[str], aliases: Mapping[str, str], unsupported: Collection[str]
) -> str:
    if name == NONE:
        return ""
    if name in formats:
        return name
    if name in aliases:
        return aliases[name]
    names = sorted({*formats, *aliases, NONE})
    if name in unsupported:
        fault = "is a parser of vLLM or SGLang for a format that Headwater does not have"
    else:
        near = difflib.get_close_matches(name, names, n=1)
        fault = f"is no parser; did you mean {near[0]}?" if near else "is no parser"
    raise UnknownParser(f"{flag} {name}: this {fault} (accepted: {', '.join(names)})")
