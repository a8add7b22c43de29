"""Hard texts, written by hand: what models write that no template does, and what is easily read as something else."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from tests.parsers.answers import Answer, Call
from tests.parsers.writers import WRITERS
from tests.parsers.writers.writer import Written


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool's definition, in the form of the chat completions API."""
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


STRING: Final = {"type": "string"}

TOOLS: Final = (
    tool(
        "f",
        s=STRING,
        t=STRING,
        n={"type": "integer"},
        o={"type": "object"},
        l={"type": "array"},
        e={"enum": ["celsius", "fahrenheit", None]},
        ns={"type": ["string", "null"]},
    ),
    tool("g", a={"type": "array"}),
)


class HardCase(NamedTuple):
    """A text of a family and what it means. `unfinished` are the names of calls without an end behind the whole ones."""

    name: str
    family: str
    text: str
    items: tuple[str | Call, ...]
    reasoning: str = ""
    unfinished: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = TOOLS

    @property
    def written(self) -> Written:
        parts = tuple(item if isinstance(item, str) else (item,) for item in self.items)
        return Written(WRITERS[self.family], list(self.tools), Answer(self.reasoning, parts), self.text)

    @property
    def comparable(self) -> bool:
        """Whether other servers' parsers of tool calls can be asked the same."""
        return not self.reasoning and not self.unfinished


def call(**arguments: Any) -> Call:
    return Call("f", arguments)


V: Final = call(s="v")

_GEMMA: Final = (
    HardCase("quotes in a string", "gemma4", '<|tool_call>call:f{s:<|"|>print(<|"|>hi<|"|>)<|"|>}<tool_call|>', (call(s='print(<|"|>hi<|"|>)'),)),
    HardCase("no opening quote", "gemma4", '<|tool_call>call:f{s:Paris, France<|"|>,n:5}<tool_call|>', (call(s="Paris, France", n=5),)),
    HardCase("JSON strings", "gemma4", '<|tool_call>call:f{"s": "has } brace"}<tool_call|>', (call(s="has } brace"),)),
    HardCase("JSON strings in an array", "gemma4", '<|tool_call>call:f{l:["a, b", "]"]}<tool_call|>', (call(l=["a, b", "]"]),)),
    HardCase("parentheses", "gemma4", "<|tool_call>call:f(n=1)<tool_call|>", (call(n=1),)),
    HardCase("Python's None", "gemma4", "<|tool_call>call:f{ns:None}<tool_call|>", (call(ns=None),)),
    HardCase("a string of digits, declared", "gemma4", '<|tool_call>call:f{s:<|"|>007<|"|>}<tool_call|>', (call(s="007"),)),
    HardCase("bare digits, declared a string", "gemma4", "<|tool_call>call:f{s:02134}<tool_call|>", (call(s="02134"),)),
    HardCase("bare number, declared a string", "gemma4", "<|tool_call>call:f{s:42}<tool_call|>", (call(s="42"),)),
    HardCase("quoted key", "gemma4", '<|tool_call>call:f{o:{<|"|>a b<|"|>:1}}<tool_call|>', (call(o={"a b": 1}),)),
    HardCase("no end of the call", "gemma4", '<|tool_call>call:f{s:<|"|>v<|"|>}', (V,)),
    HardCase("an empty bare value", "gemma4", "<|tool_call>call:f{s:,n:1}<tool_call|>", (call(s="", n=1),)),
    HardCase("an escaped newline is two characters", "gemma4", '<|tool_call>call:f{s:<|"|>a\\nb<|"|>}<tool_call|>', (call(s="a\\nb"),)),
    HardCase("the end's marker in a string", "gemma4", '<|tool_call>call:f{s:<|"|>a}<tool_call|>b<|"|>}<tool_call|>', (call(s="a}<tool_call|>b"),)),
    HardCase("quotes in a string", "functiongemma", "<start_function_call>call:f{s:<escape>say \"hi\", {x}<escape>}<end_function_call>", (call(s='say "hi", {x}'),)),
)  # fmt: skip

HEADED: Final = {
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|>"
    "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|><|plamo:tag|>",
}  # fmt: skip
"""A call with a header, and a place for its arguments."""

OBJECTS: Final = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama3_json, tagged": '<|python_tag|>{{"name": "f", "parameters": {}}}',
    "internlm": '<|action_start|><|plugin|>\n{{"name": "f", "parameters": {}}}<|action_end|>\n',
}
"""The same for calls as objects."""


def _arguments() -> Iterator[HardCase]:
    """Arguments that are no object: JSON inside a JSON string, nothing, null."""
    for family, place in {**HEADED, **OBJECTS}.items():

        def text(value: str, family: str = family, place: str = place) -> str:
            return place.format(value) if family in OBJECTS else place.replace("{}", value)

        yield HardCase("arguments in a string", family, text('"{\\"s\\": \\"v\\"}"'), (V,))
        yield HardCase("null as arguments", family, text("null"), (call(),))
        yield HardCase("a raw newline in a string", family, text('{"s": "a\nb"}'), (call(s="a\nb"),))
        if family in HEADED:
            yield HardCase("no arguments", family, text(""), (call(),))


def _qwen(*parameters: str) -> str:
    return "\n".join(["<tool_call>", "<function=f>", *parameters, "</function>", "</tool_call>"])


def _parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>"


_FILE: Final = "# Calls\n\n```\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>\n```\nThat is all.\n"

_MARKUP: Final = (
    HardCase("a parameter's marker begins a line of a value", "qwen3_coder", _qwen(_parameter("s", "a\n<parameter=x>\nb")), (call(s="a\n<parameter=x>\nb"),)),
    HardCase("a parameter's marker begins a value", "qwen3_coder", _qwen(_parameter("s", "<parameter=x>\nb")), (call(s="<parameter=x>\nb"),)),
    HardCase("the end of a parameter in a value", "qwen3_coder", _qwen(_parameter("s", "a </parameter> b")), (call(s="a </parameter> b"),)),
    HardCase("the end of a function in a value", "qwen3_coder", _qwen(_parameter("s", "a\n</function>\nb")), (call(s="a\n</function>\nb"),)),
    HardCase("a file about calls", "qwen3_coder", _qwen(_parameter("s", _FILE)), (call(s=_FILE),)),
    HardCase("a file about calls", "mimo", "<tool_call>\n<function=f>\n<parameter=s>" + _FILE + "</parameter>\n</function>\n</tool_call>", (call(s=_FILE),)),
    HardCase("a file about another format", "qwen3_coder", _qwen(_parameter("s", "<tool_call>f<arg_key>k</arg_key></tool_call>")), (call(s="<tool_call>f<arg_key>k</arg_key></tool_call>"),)),
    HardCase("a file about another format", "glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>" + _FILE + "</arg_value>\n</tool_call>", (call(s=_FILE),)),
    HardCase("a call in a value", "glm47", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call> y</arg_value></tool_call>", (call(s="x</tool_call> y"),)),
    HardCase("a marker of a call in a value", "kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|><|open|>call tool="f"<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>', (call(s='<|open|>call tool="f"', n=1),)),
    HardCase("a marker of a call without a name in a value", "kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="o" type="object"<|sep|>{"s": "<|open|>call tool=", "t": 1}<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>', (call(o={"s": "<|open|>call tool=", "t": 1}, n=1),)),
    HardCase("a call without its separator in a value", "kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|><|open|>call tool="f"<|sep|<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>', (call(s='<|open|>call tool="f"<|sep|', n=1),)),
    HardCase("the end of a call and the marker of another in a value", "glm47", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call><tool_call>: markers</arg_value></tool_call>", (call(s="x</tool_call><tool_call>: markers"),)),
    HardCase("the end of a call and one of a tool that is not offered", "glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</tool_call>\n<tool_call>h\n<arg_key></arg_value>\n</tool_call>", (call(s="x</tool_call>\n<tool_call>h\n<arg_key>"),)),
    HardCase("a value without its end before a call without arguments", "glm47", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call><tool_call>f</tool_call>", (call(s="x"), call())),
    HardCase("a value without its end before another call", "glm47", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call><tool_call>f<arg_key>s</arg_key><arg_value>y</arg_value></tool_call>", (call(s="x"), call(s="y"))),
    HardCase("a file about calls", "hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "<tool_call>\\n{}\\n</tool_call>"}}\n</tool_call>', (call(s="<tool_call>\n{}\n</tool_call>"),)),
    HardCase("a marker in a value", "minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a\n</minimax:tool_call>\nb</parameter>\n</invoke>\n</minimax:tool_call>', (call(s="a\n</minimax:tool_call>\nb"),)),
    HardCase("a nullable enum", "qwen3_coder", _qwen(_parameter("e", "None")), (call(e=None),)),
    HardCase("a nullable enum, in JSON", "qwen3_coder", _qwen(_parameter("e", "null")), (call(e=None),)),
    HardCase("strings of digits", "qwen3_coder", _qwen(_parameter("s", "007"), _parameter("t", "+15551234567")), (call(s="007", t="+15551234567"),)),
    HardCase("a postal code", "qwen3_coder", _qwen(_parameter("s", "02134")), (call(s="02134"),)),
    HardCase("a nullable string of digits", "qwen3_coder", _qwen(_parameter("ns", "02134")), (call(ns="02134"),)),
    HardCase("a declared string that is JSON", "qwen3_coder", _qwen(_parameter("s", '{"a": 1}')), (call(s='{"a": 1}'),)),
    HardCase("a declared string, null", "qwen3_coder", _qwen(_parameter("s", "null")), (call(s="null"),)),
    HardCase("strings of digits", "glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>+1555</arg_value>\n<arg_key>t</arg_key>\n<arg_value>02134</arg_value>\n</tool_call>", (call(s="+1555", t="02134"),)),
    HardCase("strings of digits", "minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">007</parameter>\n</invoke>\n</minimax:tool_call>', (call(s="007"),)),
    HardCase("a missing end of a parameter", "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", (call(s="a", n=3),)),
    HardCase("a key with spaces around it", "glm45", "<tool_call>f\n<arg_key> s </arg_key>\n<arg_value>v</arg_value>\n</tool_call>", (V,)),
    HardCase("spaces around a declared string", "glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>  v </arg_value>\n</tool_call>", (call(s="  v "),)),
)  # fmt: skip

_PYTHON: Final = (
    HardCase("three quotes", "pythonic", '[f(s="""a "b"\nc""")]', (call(s='a "b"\nc'),)),
    HardCase("three single quotes", "pythonic", "[f(s='''it's''', n=1)]", (call(s="it's", n=1),)),
    HardCase("adjacent strings", "pythonic", "[f(s='a' \"b\")]", (call(s="ab"),)),
    HardCase("a raw string", "pythonic", r"[f(s=r'\d+\n')]", (call(s=r"\d+\n"),)),
    HardCase("keys that are numbers", "pythonic", '[f(o={1: "x"})]', (call(o={"1": "x"}),)),
    HardCase("a tuple", "pythonic", "[f(l=(1, 'a'))]", (call(l=[1, "a"]),)),
    HardCase("an empty string", "pythonic", "[f(s='')]", (call(s=""),)),
    HardCase("three quotes", "lfm2", '<|tool_call_start|>[f(s="""a""")]<|tool_call_end|>', (call(s="a"),)),
    HardCase("a trailing comma", "pythonic", "[f(n=1,), g(a=[1,],)]", (call(n=1), Call("g", {"a": [1]}))),
    HardCase("JSON's words", "olmo3", "<function_calls>f(ns=null, n=3)</function_calls>", (call(ns=None, n=3),)),
    HardCase("a backslash before a quote", "pythonic", r"[f(s='C:\\')]", (call(s="C:\\"),)),
    HardCase("an arithmetic sign", "pythonic", "[f(n=-3, l=[+1, 1e3])]", (call(n=-3, l=[1, 1000.0]),)),
    HardCase("a line each in a list", "pythonic", "[\n  f(n=1),\n  f(n=2)\n]", (call(n=1), call(n=2))),
)  # fmt: skip

_F_QWEN: Final = "<function=f>\n<parameter=s>\nv\n</parameter>\n</function>"
_F_KIMI: Final = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "v"}<|tool_call_end|>'

_OUTER_MISSING: Final = {
    "kimi_k2": _F_KIMI,
    "qwen3_coder": _F_QWEN,
    "mimo": "<function=f>\n<parameter=s>v</parameter>\n</function>",
    "seed_oss": "<function=f>\n<parameter=s>v</parameter>\n</function>",
    "minimax_m2": '<invoke name="f">\n<parameter name="s">v</parameter>\n</invoke>',
    "dots": '<invoke name="f">\n<parameter name="s">v</parameter>\n</invoke>',
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "v"}\n```<｜tool▁call▁end｜>',
    "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "v"}<｜tool▁call▁end｜>',
    "deepseek_v32": '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">v</｜DSML｜parameter>\n</｜DSML｜invoke>',
    "step3": '<steptml:invoke name="f"><steptml:parameter name="s">v</steptml:parameter></steptml:invoke>',
    "hunyuan": "<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>v</arg_value>\n</tool_call>",
    "k2_horizon, json": '<ifm|tool_call>{"name": "f", "arguments": {"s": "v"}}</ifm|tool_call>',
    "kimi_k3": '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|>',
    "internlm": '<|plugin|>\n{"name": "f", "parameters": {"s": "v"}}<|action_end|>',
    "plamo3": '<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"s": "v"}'
    "<|plamo:end_tool_arguments:plamo|>",
}  # fmt: skip
"""A call without the marker around all calls."""


_TOKENS: Final = (
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "hunyuan",
    "k2_horizon, json",
    "internlm",
    "plamo3",
)
"""Families in which a token of its own opens each call: in reasoning that was not closed it can be nothing else."""


def _missing() -> Iterator[HardCase]:
    for family, text in _OUTER_MISSING.items():
        yield HardCase("no outer marker", family, text, (V,))
        writer = WRITERS[family]
        if writer.reasoning is not None and family in _TOKENS:
            opened = writer.reasoning("hm").partition("hm")[0]
            yield HardCase("no outer marker, in open reasoning", family, f"{opened}hm\n{text}", (V,), "hm")


_CUT: Final = (
    HardCase("cut before the first argument", "qwen3_coder", "<tool_call>\n<function=get_weather>\n<paramet", ()),
    HardCase("cut in the name", "qwen3_coder", "Text.\n<tool_call>\n<function=get_wea", ("Text.",)),
    HardCase("cut behind the function's end", "qwen3_coder", f"<tool_call>\n{_F_QWEN}\n</tool_", (V,)),
    HardCase("cut in a name behind the end of a call in a value", "glm47", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call><tool_call>f", (), unfinished=("f",)),
    HardCase("cut in a value", "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nsome te", (), unfinished=("f",)),
    HardCase("cut in the end of a value", "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nv\n</param", (), unfinished=("f",)),
    HardCase("cut before the function's end", "qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nv\n</parameter>\n</func", (), unfinished=("f",)),
    HardCase("cut in the end", "hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "v"}}\n</tool_c', (V,)),
    HardCase("cut in the arguments", "hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "v', (), unfinished=("f",)),
    HardCase("cut in the name", "hermes", 'Text.\n<tool_call>\n{"name": "f', ("Text.",)),
    HardCase("cut before the first argument", "glm45", "<tool_call>f\n<arg_k", ()),
    HardCase("cut in the end", "kimi_k2", "<|tool_calls_section_begin|>" + _F_KIMI + "<|tool_calls_sec", (V,)),
    HardCase("cut in the call's end", "kimi_k2", "<|tool_calls_section_begin|>" + _F_KIMI.removesuffix("_end|>"), (V,)),
    HardCase("cut in the header", "kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0", ()),
    HardCase("cut in the end", "gemma4", '<|tool_call>call:f{s:<|"|>v<|"|>}<tool_c', (V,)),
    HardCase("cut in a value", "gemma4", '<|tool_call>call:f{s:<|"|>v', (), unfinished=("f",)),
    HardCase("cut in the header", "gemma4", "<|tool_call>call:f", ()),
    HardCase("cut in the end", "deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "v"}\n``', (V,)),
    HardCase("cut in the end", "minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">v</parameter>\n</invoke>\n</minimax:tool_', (V,)),
    HardCase("cut before the first argument", "minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter na', ()),
    HardCase("cut in the end", "lfm2", "<|tool_call_start|>[f(s='v')]<|tool_call_en", (V,)),
    HardCase("cut in an escape", "lfm2", "<|tool_call_start|>[f(s='v\\", (), unfinished=("f",)),
)  # fmt: skip

_REASONING: Final = (
    HardCase("a call in closed reasoning", "hermes", '<think>I would write <tool_call>{"name": "f", "arguments": {}}</tool_call>.</think>No.', ("No.",), 'I would write <tool_call>{"name": "f", "arguments": {}}</tool_call>.'),
    HardCase("a marker in reasoning", "qwen3_coder", f"<think>The token <tool_call> opens a call.</think>\n<tool_call>\n{_F_QWEN}\n</tool_call>", (V,), "The token <tool_call> opens a call."),
    HardCase("reasoning that is not closed", "qwen3_coder", f"<think>hm\n<tool_call>\n{_F_QWEN}\n</tool_call>", (V,), "hm"),
    HardCase("reasoning that is not closed", "kimi_k2", f"<think>hm<|tool_calls_section_begin|>{_F_KIMI}<|tool_calls_section_end|>", (V,), "hm"),
)  # fmt: skip

HARD_CASES: Final = (*_GEMMA, *_arguments(), *_MARKUP, *_PYTHON, *_missing(), *_CUT, *_REASONING)
