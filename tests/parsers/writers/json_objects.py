"""Families that write calls as JSON objects, or as a header and JSON."""

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from tests.parsers.answers import Call
from tests.parsers.writers.writer import Group, Writer, dumps


def _object(call: Call, name: str = "name", arguments: str = "arguments") -> dict[str, Any]:
    return {name: call.name, arguments: call.arguments}


def each(before: str, behind: str, *, between: str = "\n", arguments: str = "arguments") -> Group:
    """An object for each call, between markers."""

    def write(calls: Sequence[Call], rnd: Random) -> str:
        return between.join(
            f"{before}{dumps(_object(call, arguments=arguments), rnd)}{behind}" for call in calls
        )

    return write


def array(before: str, behind: str = "", *, arguments: str = "arguments") -> Group:
    """One array of objects, between markers."""

    def write(calls: Sequence[Call], rnd: Random) -> str:
        return f"{before}{dumps([_object(call, arguments=arguments) for call in calls], rnd)}{behind}"

    return write


def _cohere(calls: Sequence[Call], rnd: Random) -> str:
    rows = [
        dumps({"tool_call_id": str(number), "tool_name": call.name, "parameters": call.arguments}, rnd)
        for number, call in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(rows) + "\n]<|END_ACTION|>"


def _apertus(calls: Sequence[Call], rnd: Random) -> str:
    return f"<|tools_prefix|>{dumps([{call.name: call.arguments} for call in calls], rnd)}<|tools_suffix|>"


def _deepseek_v3(calls: Sequence[Call], rnd: Random) -> str:
    rows = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{dumps(call.arguments, rnd)}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(rows) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call], rnd: Random) -> str:
    rows = [
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{dumps(call.arguments, rnd)}<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(rows) + "<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Sequence[Call], rnd: Random) -> str:
    rows = [
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>"
        f"{dumps(call.arguments, rnd)}<|tool_call_end|>"
        for number, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(rows) + "<|tool_calls_section_end|>"


def _mistral(middle: str) -> Group:
    def write(calls: Sequence[Call], rnd: Random) -> str:
        return "".join(f"[TOOL_CALLS]{call.name}{middle}{dumps(call.arguments, rnd)}" for call in calls)

    return write


def _solar(calls: Sequence[Call], rnd: Random) -> str:
    rows = [
        f"<|tool_call:begin|>id{number}<|tool_call:name|>{call.name}<|tool_call:args|>{dumps(call.arguments, rnd)}<|tool_call:end|>"
        for number, call in enumerate(calls)
    ]
    return "<|tool_calls|>" + "".join(rows) + "<|calls|>"


def _functionary(calls: Sequence[Call], rnd: Random) -> str:
    return "".join(f"<function={call.name}>{dumps(call.arguments, rnd)}</function>" for call in calls)


def _command_r(calls: Sequence[Call], rnd: Random) -> str:
    rows = [dumps({"tool_name": call.name, "parameters": call.arguments}, rnd) for call in calls]
    return "Action:\n```json\n[\n    " + ",\n    ".join(rows) + "\n]```"


def _lines(calls: Sequence[Call], rnd: Random) -> str:
    rows = [dumps(_object(call), rnd) for call in calls]
    return "<tool_calls>\n" + "\n".join(rows) + "\n</tool_calls>"


def _plamo3(calls: Sequence[Call], rnd: Random) -> str:
    rows = [
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{call.name}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{dumps(call.arguments, rnd)}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        for call in calls
    ]
    return (
        "<|plamo:begin_tool_requests:plamo|>"
        + "".join(rows)
        + "<|plamo:end_tool_requests:plamo|><|plamo:tag|>"
    )


def _marked(before: str, behind: str) -> dict[str, Any]:
    return {"reasoning": lambda text: f"{before}{text}{behind}"}


_ONCE: Final[dict[str, Any]] = {"between": False, "behind": False}
_NO_REASONING: Final[dict[str, Any]] = {"reasoning": None, "reasoning_format": ""}
_MISTRAL: Final[dict[str, Any]] = {
    "tool_format": "mistral",
    "reasoning_format": "mistral",
    "separator": "",
    "vllm": "mistral",
    "sglang": "mistral",
    **_marked("[THINK]", "[/THINK]"),
    **_ONCE,
}
_COHERE: Final[dict[str, Any]] = {
    "reasoning_format": "cohere_command",
    "text": lambda text: f"<|START_RESPONSE|>{text}<|END_RESPONSE|>",
    "separator": "",
    **_marked("<|START_THINKING|>", "<|END_THINKING|>"),
    **_ONCE,
}

JSON_WRITERS: Final = (
    Writer("hermes", "hermes", each("<tool_call>\n", "\n</tool_call>"), vllm="hermes", sglang="hermes"),
    Writer("longcat", "longcat", each("<longcat_tool_call>\n", "\n</longcat_tool_call>"), vllm="longcat"),
    Writer(
        "llama3_json", "llama3_json", each("", "", between="; ", arguments="parameters"), before=False, bare=True,
        vllm="llama3_json", sglang="llama3", **_NO_REASONING, **_ONCE,
    ),
    Writer(
        "llama3_json, tagged", "llama3_json", each("<|python_tag|>", "", between="; ", arguments="parameters"), before=False,
        calls_max=1, vllm="llama3_json", sglang="llama3", **_NO_REASONING, **_ONCE,
    ),
    Writer("granite", "granite", array("<|tool_call|>"), vllm="granite", **_NO_REASONING, **_ONCE),
    Writer("granite 3.1", "granite", array("<tool_call>"), vllm="granite", **_NO_REASONING, **_ONCE),
    Writer(
        "granite-20b-fc", "granite-20b-fc", each("<function_call> ", "", between=" "), vllm="granite-20b-fc",
        **_NO_REASONING, **_ONCE,
    ),
    Writer("jamba", "jamba", array("<tool_calls>", "</tool_calls>"), vllm="jamba", **_NO_REASONING),
    Writer("minimax_m1", "minimax_m1", _lines),
    Writer("nemotron_nano_v2", "nemotron_nano_v2", array("<TOOLCALL>", "</TOOLCALL>")),
    Writer("command_r", "command_r", _command_r, **_NO_REASONING, **_ONCE),
    Writer("functionary_v31", "functionary_v31", _functionary, **_NO_REASONING, **_ONCE),
    Writer("solar_open", "solar_open", _solar, separator="", **_ONCE),
    Writer(
        "internlm", "internlm", each("<|action_start|><|plugin|>\n", "<|action_end|>\n", between="", arguments="parameters"),
        vllm="internlm",
    ),
    Writer(
        "intern_s1", "internlm", each("<|action_start|> <|plugin|>\n", "<|action_end|>\n", between="", arguments="parameters"),
        sglang="interns1",
    ),
    Writer(
        "phi4_mini_json", "phi4_mini_json", array("functools"), bare=True, separator=" ", vllm="phi4_mini_json",
        **_NO_REASONING, **_ONCE,
    ),
    Writer("xlam", "xlam", array(""), before=False, bare=True, vllm="xlam", **_NO_REASONING, **_ONCE),
    Writer("xlam, fenced", "xlam", array("```json\n", "\n```"), bare=True, vllm="xlam", **_ONCE),
    Writer("cohere_command", "cohere_command", _cohere, vllm="cohere_command3", sglang="cohere_command4", **_COHERE),
    Writer(
        "gigachat3", "gigachat3", each("<|message_sep|>\n\nfunction call<|role_sep|>\n", ""), calls_max=1, separator="",
        vllm="gigachat3", sglang="gigachat3", **_NO_REASONING, **_ONCE,
    ),
    Writer(
        "gigachat3.1", "gigachat3", each("<|function_call|>", ""), calls_max=1, separator="", vllm="gigachat3",
        sglang="gigachat3", **_NO_REASONING, **_ONCE,
    ),
    Writer(
        "apertus", "apertus", _apertus, reasoning_format="apertus", separator="", vllm="apertus", sglang="apertus2509",
        **_marked("<|inner_prefix|>", "<|inner_suffix|>"), **_ONCE,
    ),
    Writer("deepseek_v3", "deepseek_v3", _deepseek_v3, vllm="deepseek_v3", sglang="deepseekv3", **_ONCE),
    Writer("deepseek_v31", "deepseek_v31", _deepseek_v31, separator="", vllm="deepseek_v31", sglang="deepseekv31", **_ONCE),
    Writer("kimi_k2", "kimi_k2", _kimi_k2, separator="", vllm="kimi_k2", sglang="kimi_k2", **_ONCE),
    Writer("mistral", group=_mistral("[ARGS]"), **_MISTRAL),
    Writer("mistral, with ids", group=_mistral("[CALL_ID]a1B2c3D4e[ARGS]"), **_MISTRAL),
    Writer("mistral, names alone", group=_mistral(""), **_MISTRAL),
    Writer("mistral, an array", group=array("[TOOL_CALLS]"), **_MISTRAL),
    Writer(
        "plamo3", "plamo3", _plamo3, reasoning_format="plamo3", separator="", vllm="plamo3",
        **_marked("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"), **_ONCE,
    ),
)  # fmt: skip
