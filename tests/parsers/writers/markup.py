"""Families that write calls as markup, with values as plain text."""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from tests.parsers.answers import Call
from tests.parsers.writers.writer import Group, Writer, dumps

Plain = Callable[[Any, Random], str]


def as_json(value: Any, _rnd: Random) -> str:
    """A string as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def with_python_words(value: Any, rnd: Random) -> str:
    """As JSON, but `True`, `False` and `None` outside structures: Qwen's and NVIDIA's templates."""
    return str(value) if value is None or isinstance(value, bool) else as_json(value, rnd)


def as_python(value: Any, _rnd: Random) -> str:
    """As Python prints it: Seed-OSS's template."""
    return str(value)


def _qwen(marker: str, edge: str, plain: Plain, *, between: str = "\n") -> Group:
    def write_one(call: Call, rnd: Random) -> str:
        rows = [f"<{marker}>", f"<function={call.name}>"]
        rows += [
            f"<parameter={key}>{edge}{plain(value, rnd)}{edge}</parameter>"
            for key, value in call.arguments.items()
        ]
        return "\n".join([*rows, "</function>", f"</{marker}>"])

    return lambda calls, rnd: between.join(write_one(call, rnd) for call in calls)


def _glm(newline: str) -> Group:
    def write_one(call: Call, rnd: Random) -> str:
        rows = "".join(
            f"<arg_key>{key}</arg_key>{newline}<arg_value>{as_json(value, rnd)}</arg_value>{newline}"
            for key, value in call.arguments.items()
        )
        return f"<tool_call>{call.name}{newline}{rows}</tool_call>"

    return lambda calls, rnd: newline.join(write_one(call, rnd) for call in calls)


def _invokes(before: str, behind: str, tag: str = "") -> Group:
    """`<invoke name=…><parameter name=…>` with `tag` in each name: MiniMax, dots."""

    def write(calls: Sequence[Call], rnd: Random) -> str:
        rows = [before]
        for call in calls:
            rows.append(f'<{tag}invoke name="{call.name}">')
            rows += [
                f'<{tag}parameter name="{key}">{as_json(value, rnd)}</{tag}parameter>'
                for key, value in call.arguments.items()
            ]
            rows.append(f"</{tag}invoke>")
        return "\n".join([*rows, behind])

    return write


def _minicpm5(calls: Sequence[Call], rnd: Random) -> str:
    """Strings with `<`, `&` or a newline are CDATA; everything else is as Python prints it, as the template writes it."""

    def plain(value: Any) -> str:
        in_cdata = isinstance(value, str) and any(character in value for character in "<&\n")
        return f"<![CDATA[{value}]]>" if in_cdata else as_python(value, rnd)

    rows = []
    for call in calls:
        params = "".join(
            f'<param name="{key}">{plain(value)}</param>' for key, value in call.arguments.items()
        )
        rows.append(f'<function name="{call.name}">{params}</function>')
    return "\n".join(rows)


def _step3(calls: Sequence[Call], rnd: Random) -> str:
    rows = []
    for call in calls:
        parameters = "".join(
            f'<steptml:parameter name="{key}">{as_json(value, rnd)}</steptml:parameter>'
            for key, value in call.arguments.items()
        )
        rows.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{call.name}">{parameters}</steptml:invoke><｜tool_call_end｜>'
        )
    return "<｜tool_calls_begin｜>" + "\n".join(rows) + "<｜tool_calls_end｜>"


def _dsml(outer: str, space: str) -> Group:
    def write(calls: Sequence[Call], rnd: Random) -> str:
        rows = [f"<｜DSML｜{outer}>"]
        for call in calls:
            rows.append(f'<｜DSML｜{space}invoke name="{call.name}">')
            rows += [
                f'<｜DSML｜{space}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                f"{as_json(value, rnd)}</｜DSML｜{space}parameter>"
                for key, value in call.arguments.items()
            ]
            rows.append(f"</｜DSML｜{space}invoke>")
        return "\n".join([*rows, f"</｜DSML｜{outer}>"])

    return write


def json_type(value: Any) -> str:
    """The name of a value's type in JSON schemas; integers are numbers."""
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {
        str: "string",
        int: "number",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]


def _kimi_k3(calls: Sequence[Call], rnd: Random) -> str:
    rows = ["<|open|>tools<|sep|>"]
    for number, call in enumerate(calls, 1):
        rows.append(f'<|open|>call tool="{call.name}" index="{number}"<|sep|>')
        rows += [
            f'<|open|>argument key="{key}" type="{json_type(value)}"<|sep|>{as_json(value, rnd)}<|close|>argument<|sep|>'
            for key, value in call.arguments.items()
        ]
        rows.append("<|close|>call<|sep|>")
    return "".join([*rows, "<|close|>tools<|sep|><|close|>message<|sep|>"])


def _hunyuan(suffix: str) -> Group:
    def write(calls: Sequence[Call], rnd: Random) -> str:
        rows = [f"<tool_calls{suffix}>"]
        for call in calls:
            rows.append(f"<tool_call{suffix}>{call.name}<tool_sep{suffix}>")
            for key, value in call.arguments.items():
                rows.append(f"<arg_key{suffix}>{key}</arg_key{suffix}>")
                rows.append(f"<arg_value{suffix}>{as_json(value, rnd)}</arg_value{suffix}>")
            rows.append(f"</tool_call{suffix}>")
        return "\n".join([*rows, f"</tool_calls{suffix}>"])

    return write


def _k2_horizon(kind: str) -> Group:
    def body(call: Call, rnd: Random) -> str:
        if kind == "json":
            return dumps({"name": call.name, "arguments": call.arguments}, rnd)
        rows = [call.name]
        for key, value in call.arguments.items():
            typed = f"<ifm|arg_type>{json_type(value)}</ifm|arg_type>" if kind == "typed" else ""
            rows.append(
                f"<ifm|arg_key>{key}</ifm|arg_key>{typed}<ifm|arg_value>{as_json(value, rnd)}</ifm|arg_value>"
            )
        return "\n".join([*rows, ""])

    def write(calls: Sequence[Call], rnd: Random) -> str:
        rows = "".join(f"<ifm|tool_call>{body(call, rnd)}</ifm|tool_call>\n" for call in calls)
        return f"<ifm|tool_calls>\n{rows}</ifm|tool_calls>"

    return write


def _unsafe(end: str, following: Sequence[str], *others: str) -> re.Pattern[str]:
    """An end of a value with more of the call's markup behind it, or one of the other patterns."""
    patterns = [rf"{re.escape(end)}\s*(?:{'|'.join(map(re.escape, following))})", *others]
    return re.compile("|".join(patterns))


def _begun(opening: str, parameter: str, end: str, close: str) -> str:
    """A call that is begun in a value and not ended there: the same text is a whole call in a value, in an answer that is cut off."""
    return rf"{opening}\s*{re.escape(parameter)}(?![\s\S]*{re.escape(end)}\s*{re.escape(close)})"


_QWEN_LOOKS: Final = (
    r"\A\s*</function>",
    _begun("<function=[^<>]+>", "<parameter=", "</parameter>", "</function>"),
)
"""The end of a call whose value was forgotten, which an answer that is cut off may end with; and a call that is begun in a value."""

_QWEN_UNSAFE: Final = _unsafe(
    "</parameter>",
    ("<parameter=", "</function>", "</tool_call>"),
    r"\n</function>\s*</tool_call>",
    *_QWEN_LOOKS,
)
_QWEN_MARKUP: Final = (
    "</parameter>",
    "<parameter=other>",
    "\n<parameter=other>\nv\n",
    "</function>",
    "<tool_call>\n<function=f>\n",
)
_GLM_UNSAFE: Final = _unsafe(
    "</arg_value>",
    ("<arg_key>", "</tool_call>"),
    r"</tool_call>\s*<tool_call>\s*\w+\s*(?:<arg_key>|</tool_call>)",
    _begun(r"<tool_call>\s*[^\s<>{}\"]+", "<arg_key>", "</arg_value>", "</tool_call>"),
)
"""Also the end of a call and the beginning of another: the value's own end may have been forgotten."""

_INVOKE_UNSAFE: Final = _unsafe(
    "</parameter>",
    ("<parameter name=", "</invoke>"),
    _begun(r"<invoke name=[^<>]+>", "<parameter name=", "</parameter>", "</invoke>"),
)
_PARAM_UNSAFE: Final = _unsafe(
    "</param>",
    ("<param name=", "</function>"),
    _begun(r"<function[^<>]+>", "<param", "</param>", "</function>"),
)
_STEP_UNSAFE: Final = _unsafe(
    "</steptml:parameter>",
    ("<steptml:parameter", "</steptml:invoke>"),
    _begun(r"<steptml:invoke[^<>]+>", "<steptml:parameter", "</steptml:parameter>", "</steptml:invoke>"),
)


def _hunyuan_unsafe(suffix: str) -> re.Pattern[str]:
    parameter, end, close = f"<arg_key{suffix}>", f"</arg_value{suffix}>", f"</tool_call{suffix}>"
    return _unsafe(
        end,
        (parameter, close),
        _begun(rf"<tool_call{suffix}>\s*[^\s<>]+\s*<tool_sep{suffix}>", parameter, end, close),
    )


_IFM_UNSAFE: Final = _unsafe(
    "</ifm|arg_value>",
    ("<ifm|arg_key>", "</ifm|tool_call>"),
    _begun(r"<ifm\|tool_call>\s*[^\s<>{}\"]+", "<ifm|arg_key>", "</ifm|arg_value>", "</ifm|tool_call>"),
)
_HORIZON: Final[dict[str, Any]] = {
    "tool_format": "k2_horizon",
    "reasoning_format": "k2_horizon",
    "reasoning": lambda text: f"<ifm|think>\n{text}\n</ifm|think>\n",
    "unsafe": _IFM_UNSAFE,
    "markup": ("<ifm|arg_key>", "</ifm|arg_value>", "<ifm|tool_call>f\n", "</ifm|tool_call>"),
    "sglang": "k2_horizon",
    "between": False,
    "behind": False,
}
_XML: Final[dict[str, Any]] = {"typeless": True}
_ONCE: Final[dict[str, Any]] = {"between": False, "behind": False}


def _dsml_writer(name: str, outer: str, space: str, vllm: str, sglang: str) -> Writer:
    end, parameter = f"</｜DSML｜{space}parameter>", f"<｜DSML｜{space}parameter"
    close = f"</｜DSML｜{space}invoke>"
    return Writer(
        name, "deepseek_v32", _dsml(outer, space), separator="\n\n", vllm=vllm, sglang=sglang,
        unsafe=_unsafe(end, (parameter, close), _begun(f"<｜DSML｜{space}invoke[^<>]+>", parameter, end, close)),
        markup=(end, f'{parameter} name="x" string="true">', f'<｜DSML｜{space}invoke name="f">', close, f"</｜DSML｜{outer}>"), **_ONCE,
    )  # fmt: skip


MARKUP_WRITERS: Final = (
    Writer(
        "qwen3_coder", "qwen3_coder", _qwen("tool_call", "\n", with_python_words), unsafe=_QWEN_UNSAFE, markup=_QWEN_MARKUP,
        separator="\n\n", vllm="qwen3_coder", sglang="qwen3_coder", forgiving_end="</function>", **_XML,
    ),
    Writer(
        "step3p5", "qwen3_coder", _qwen("tool_call", "\n", with_python_words, between=""), unsafe=_QWEN_UNSAFE,
        markup=_QWEN_MARKUP, separator="", vllm="step3p5", sglang="step3p5", forgiving_end="</function>", **_XML,
    ),
    Writer(
        "mimo", "mimo", _qwen("tool_call", "", as_json), unsafe=_QWEN_UNSAFE, markup=_QWEN_MARKUP, vllm="mimo", sglang="mimo",
        forgiving_end="</function>", **_XML,
    ),
    Writer(
        "seed_oss", "seed_oss", _qwen("seed:tool_call", "", as_python), reasoning_format="seed_oss", vllm="seed_oss",
        reasoning=lambda text: f"<seed:think>{text}</seed:think>\n", markup=_QWEN_MARKUP,
        unsafe=_unsafe("</parameter>", ("<parameter=", "</function>", "</seed:tool_call>"), r"\n</function>\s*</seed:tool_call>", *_QWEN_LOOKS),
        forgiving_end="</function>", **_XML,
    ),
    Writer(
        "glm45", "glm", _glm("\n"), unsafe=_GLM_UNSAFE, markup=("</arg_value>", "</tool_call>", "<arg_key>", "<tool_call>f\n"), vllm="glm45",
        sglang="glm45", forgiving_end="</tool_call>", **_XML,
    ),
    Writer(
        "glm47", "glm", _glm(""), unsafe=_GLM_UNSAFE, markup=("</arg_value>", "</tool_call>", "<arg_key>", "<tool_call>f\n"), separator="",
        vllm="glm47", sglang="glm47", forgiving_end="</tool_call>", **_XML,
    ),
    Writer(
        "minimax_m2", "minimax_m2", _invokes("<minimax:tool_call>", "</minimax:tool_call>"), unsafe=_INVOKE_UNSAFE,
        markup=("</parameter>", '<parameter name="other">', '<invoke name="f">', "</invoke>", "</minimax:tool_call>"), vllm="minimax_m2", sglang="minimax-m2", **_XML,
    ),
    Writer(
        "dots", "dots", _invokes("<dots_function_call>", "</dots_function_call>"), unsafe=_INVOKE_UNSAFE, vllm="dots",
        markup=("</parameter>", '<parameter name="other">', '<invoke name="f">', "</invoke>", "</dots_function_call>"), sglang="dots", **_XML,
    ),
    Writer(
        "minicpm5", "minicpm5", _minicpm5, unsafe=_PARAM_UNSAFE, vllm="minicpm5", sglang="minicpm5",
        tokens=("<function", "</function>", "<param", "</param>"),
        markup=("</param>", "]]>", "]]></param>", "<![CDATA[", '<param name="other">', '<function name="f">', "</function>"), **_XML,
    ),
    Writer(
        "step3", "step3", _step3, reasoning_format="think_opened", inside=True, separator="", vllm="step3", sglang="step3",
        reasoning=lambda text: f"{text}</think>", unsafe=_STEP_UNSAFE,
        markup=("</steptml:parameter>", '<steptml:parameter name="x">', '<steptml:invoke name="f">', "</steptml:invoke>"), **_ONCE, **_XML,
    ),
    _dsml_writer("deepseek_v32", "function_calls", "", "deepseek_v32", "deepseekv32"),
    _dsml_writer("deepseek_v4", "tool_calls", "", "deepseek_v4", "deepseekv4"),
    _dsml_writer("deepseek_v41", " calls", " ", "deepseek_v41", "deepseekv41"),
    Writer(
        "kimi_k3", "kimi_k3", _kimi_k3, reasoning_format="kimi_k3", separator="", vllm="kimi_k3", sglang="kimi_k3",
        reasoning=lambda text: f"<|open|>think<|sep|>{text}<|close|>think<|sep|>",
        text=lambda text: f"<|open|>response<|sep|>{text}<|close|>response<|sep|>",
        unsafe=_unsafe(
            "<|close|>argument<|sep|>", ("<|open|>argument", "<|close|>call"),
            _begun(r'<\|open\|>call\s+tool="[^"<]+"[^<]*<\|sep\|>', "<|open|>argument", "<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
        ),
        markup=(
            "<|close|>argument<|sep|>", '<|open|>argument key="x"<|sep|>', '<|open|>call tool="f"<|sep|>', "<|close|>call<|sep|>", "<|sep|>",
            "<|open|>",
        ), **_ONCE,
    ),
    Writer(
        "hunyuan", "hunyuan", _hunyuan(""), reasoning_format="hunyuan", unsafe=_hunyuan_unsafe(""), vllm="hy_v3", **_ONCE, **_XML,
        markup=("</arg_value>", "<arg_key>", "<tool_sep>", "<tool_call>f<tool_sep>", "</tool_call>"), reasoning=lambda text: f"<think>{text}</think>",
    ),
    Writer(
        "hunyuan, released", "hunyuan", _hunyuan(":opensource"), reasoning_format="hunyuan", unsafe=_hunyuan_unsafe(":opensource"),
        reasoning=lambda text: f"<think:opensource>{text}</think:opensource>",
        markup=("</arg_value:opensource>", "<arg_key:opensource>", "<tool_call:opensource>f<tool_sep:opensource>", "</tool_call:opensource>"), **_ONCE, **_XML,
    ),
    Writer("k2_horizon, json", group=_k2_horizon("json"), vllm="k2_horizon:json", **_HORIZON),
    Writer("k2_horizon, xml", group=_k2_horizon("xml"), vllm="k2_horizon:xml", **_HORIZON, **_XML),
    Writer("k2_horizon, typed", group=_k2_horizon("typed"), vllm="k2_horizon:xml_typed", **_HORIZON),
)  # fmt: skip
