"""Calls as markup with parameters."""

from typing import Final

from headwater.actors.edge.parsing.context import ToolFormat
from headwater.actors.edge.parsing.headed_calls import Header
from headwater.actors.edge.parsing.reader import WHITESPACE
from headwater.actors.edge.parsing.xml_calls import XmlCalls

_STRING: Final = frozenset({"string"})

_ANY_JSON: Final = frozenset({"null", "boolean", "number", "array", "object"})


def _qwen(marker: str, *, newlines: bool = True) -> XmlCalls:
    """The markup of Qwen 3 Coder between `<marker>` and `</marker>`."""
    end = f"</{marker}>"
    return XmlCalls(
        prefix=("<function=",),
        name=Header(ends=(">",), pattern=r"\s*(?P<name>[^\s<>]+)\s*"),
        parameter="<parameter=",
        key=Header(ends=(">",), pattern=r"\s*(?P<key>[^<>]+?)\s*"),
        value_end="</parameter>",
        close=("</function>", end),
        after=(end,),
        missing_end={"\n<parameter=": (), "\n</function>": (end,)},
        newlines=newlines,
    )


_QWEN: Final = _qwen("tool_call")

QWEN3_CODER: Final = ToolFormat(
    calls={"<tool_call>": _QWEN, "<function=": _QWEN},
    framing=("</tool_call>",),
    end_reasoning=("<tool_call>\n<function=",),
)
"""`<tool_call><function=name><parameter=key>…`: Qwen 3 Coder and Qwen 3.5 on. The outer marker may be missing."""

_SEED: Final = _qwen("seed:tool_call", newlines=False)

SEED_OSS: Final = ToolFormat(
    calls={"<seed:tool_call>": _SEED, "<function=": _SEED},
    framing=("</seed:tool_call>",),
    end_reasoning=("<seed:tool_call>",),
)
"""The same between `<seed:tool_call>` markers: Seed-OSS."""

_MIMO: Final = _qwen("tool_call", newlines=False)

MIMO: Final = ToolFormat(
    calls={"<tool_call>": _MIMO, "<function=": _MIMO},
    framing=("</tool_call>",),
    end_reasoning=("<tool_call>\n<function=",),
)
"""The same without newlines around values: those that are there belong to them. MiMo."""

_GLM: Final = XmlCalls(
    name=Header(ends=("<arg_key>", "</tool_call>"), pattern=r"\s*(?P<name>[^\s<>{}\"]+)\s*"),
    parameter="<arg_key>",
    key=Header(ends=("<arg_value>",), pattern=r"\s*(?P<key>.*?)\s*</arg_key>\s*"),
    value_end="</arg_value>",
    close=("</tool_call>",),
    missing_end={"</tool_call>": ("<tool_call>",)},
)

GLM: Final = ToolFormat(calls={"<tool_call>": _GLM}, framing=("</tool_call>",), trim=WHITESPACE)
"""`<tool_call>name<arg_key>key</arg_key><arg_value>…`: GLM 4.5 on."""

_MINICPM: Final = XmlCalls(
    name=Header(ends=(">",), pattern=r"\s*name=[\"'](?P<name>[^\"'<>]+)[\"']\s*"),
    parameter="<param",
    key=Header(ends=(">",), pattern=r"\s*name=[\"'](?P<key>[^\"'<>]+)[\"']\s*"),
    value_end="</param>",
    close=("</function>",),
    cdata=True,
)

MINICPM5: Final = ToolFormat(calls={"<function": _MINICPM})
"""`<function name="name"><param name="key">…</param></function>`, strings with markup or newlines in CDATA: MiniCPM5."""

_MINIMAX: Final = XmlCalls(
    name=Header(ends=('">', '"/>'), pattern=r"\s*(?P<name>[^\s\"<>]+)\s*"),
    parameter='<parameter name="',
    key=Header(ends=('">',), pattern=r"(?P<key>[^\"]+)"),
    value_end="</parameter>",
    close=("</invoke>",),
)

MINIMAX_M2: Final = ToolFormat(
    calls={'<invoke name="': _MINIMAX},
    framing=("<minimax:tool_call>", "</minimax:tool_call>"),
    end_reasoning=("<minimax:tool_call>",),
)
"""`<minimax:tool_call><invoke name="name"><parameter name="key">…`: MiniMax M2."""


def _dsml(space: str) -> XmlCalls:
    """DeepSeek's markup language. Its later form has a space before each element's name."""
    return XmlCalls(
        name=Header(ends=('">', '"/>'), pattern=r"(?P<name>[^\s\"<>]+)"),
        parameter=f'<｜DSML｜{space}parameter name="',
        key=Header(ends=(">",), pattern=r"(?P<key>[^\"]+)\"(?:\s+string=\"(?P<type>true|false)\")?\s*"),
        value_end=f"</｜DSML｜{space}parameter>",
        close=(f"</｜DSML｜{space}invoke>",),
        types={"true": _STRING, "false": _ANY_JSON},
    )


def _dsml_framing(name: str) -> tuple[str, ...]:
    return (f"<｜DSML｜{name}>", f"</｜DSML｜{name}>")


DEEPSEEK_V32: Final = ToolFormat(
    calls={'<｜DSML｜invoke name="': _dsml(""), '<｜DSML｜ invoke name="': _dsml(" ")},
    framing=(*_dsml_framing("function_calls"), *_dsml_framing("tool_calls"), *_dsml_framing(" calls")),
    end_reasoning=(
        *("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>"),
        *('<｜DSML｜invoke name="', '<｜DSML｜ invoke name="'),
    ),
)
"""`<｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">…`: DeepSeek V3.2, V4 and V4.1."""

_KIMI_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")

KIMI_K3: Final = ToolFormat(
    calls={
        "<|open|>call ": XmlCalls(
            name=Header(ends=("<|sep|>",), pattern=r"\s*tool=\"(?P<name>[^\"<]+)\"[^<]*"),
            parameter="<|open|>argument ",
            key=Header(
                ends=("<|sep|>",), pattern=r"\s*key=\"(?P<key>[^\"]*)\"(?:\s+type=\"(?P<type>\w+)\")?[^<]*"
            ),
            value_end="<|close|>argument<|sep|>",
            close=("<|close|>call<|sep|>",),
            entities=True,
            types={kind: frozenset({kind}) for kind in _KIMI_TYPES},
        )
    },
    framing=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    trim="",
    end_reasoning=("<|open|>tools<|sep|>",),
)
"""`<|open|>call tool="name"<|sep|><|open|>argument key="key" type="string"<|sep|>…`: Kimi K3."""
