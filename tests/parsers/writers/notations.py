"""Families with notations of their own: Python, Gemma's, Harmony."""

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from tests.parsers.answers import Call
from tests.parsers.drawing import often
from tests.parsers.writers.writer import Group, Writer, dumps


def python(value: Any, rnd: Random) -> str:
    """A Python literal. Strings stand between the quotes that Python prefers, seldom between those of JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python(key, rnd)}: {python(one, rnd)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(python(one, rnd) for one in value) + "]"
    if isinstance(value, str) and not often(rnd, 3):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _python_call(call: Call, rnd: Random) -> str:
    return f"{call.name}({', '.join(f'{key}={python(value, rnd)}' for key, value in call.arguments.items())})"


def _pythonic(before: str, behind: str, between: str = ", ") -> Group:
    return lambda calls, rnd: before + between.join(_python_call(call, rnd) for call in calls) + behind


def _gemma_value(value: Any, quote: str, null: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(one, quote, null)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(one, quote, null) for one in value) + "]"
    if isinstance(value, str):
        return quote + value + quote
    return null if value is None else json.dumps(value)


def _gemma(before: str, behind: str, quote: str) -> Group:
    """Keys are sorted, as the template sorts them; null is `null` or, as the template prints it, `None`."""

    def write(calls: Sequence[Call], rnd: Random) -> str:
        null = "null" if often(rnd, 3) else "None"
        return "".join(
            f"{before}call:{call.name}{_gemma_value(dict(sorted(call.arguments.items())), quote, null)}{behind}"
            for call in calls
        )

    return write


def _harmony(calls: Sequence[Call], rnd: Random) -> str:
    rows = []
    for call in calls:
        if often(rnd, 3):
            header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
        else:
            header = f" to=functions.{call.name}<|channel|>commentary json"
        rows.append(f"<|start|>assistant{header}<|message|>{dumps(call.arguments, rnd)}<|call|>")
    return "".join(rows)


_ONCE: Final[dict[str, Any]] = {"between": False, "behind": False}
_NO_REASONING: Final[dict[str, Any]] = {"reasoning": None, "reasoning_format": ""}

NOTATION_WRITERS: Final = (
    Writer(
        "pythonic", "pythonic", _pythonic("[", "]"), before=False, bare=True, vllm="pythonic", sglang="pythonic",
        **_NO_REASONING, **_ONCE,
    ),
    Writer(
        "llama4_pythonic", "pythonic", _pythonic("<|python_start|>[", "]<|python_end|>"), before=False, vllm="llama4_pythonic",
        sglang="pythonic", **_NO_REASONING, **_ONCE,
    ),
    Writer(
        "olmo3", "pythonic", _pythonic("<function_calls>\n", "\n</function_calls>", "\n"), vllm="olmo3", **_ONCE,
    ),
    Writer(
        "lfm2", "lfm2", _pythonic("<|tool_call_start|>[", "]<|tool_call_end|>"), vllm="lfm2", sglang="lfm2", separator="",
        **_NO_REASONING,
    ),
    Writer(
        "gemma4", "gemma4", _gemma("<|tool_call>", "<tool_call|>", '<|"|>'), reasoning_format="gemma4", separator="",
        reasoning=lambda text: f"<|channel>thought\n{text}\n<channel|>", unsafe=re.compile(r'<\|"\|>'),
        markup=("<tool_call|>", "<|tool_call>call:f{", '<|"', "}<tool_call|>"), vllm="gemma4", sglang="gemma4",
    ),
    Writer(
        "functiongemma", "functiongemma", _gemma("<start_function_call>", "<end_function_call>", "<escape>"), separator="",
        unsafe=re.compile("<escape>"), markup=("<end_function_call>", "<start_function_call>call:"), vllm="functiongemma",
        **_NO_REASONING,
    ),
    Writer(
        "harmony", "harmony", _harmony, reasoning_format="harmony", separator="", begins="<|start|>assistant",
        reasoning=lambda text: f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>",
        text=lambda text: f"<|start|>assistant<|channel|>commentary<|message|>{text}<|end|>", sglang="gpt-oss",
        markup=("<|call|>", "<|end|>", "<|message|>"),
    ),
)  # fmt: skip
