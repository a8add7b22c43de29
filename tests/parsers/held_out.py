"""Hard texts that no parser is tuned to: what vLLM's and SGLang's own tests require, on texts of our own.

Read the failures of `test_held_out` as a measure, and repair what they have in common with other texts; do not write code for one of them.
"""

from typing import Any, Final

from tests.parsers.answers import Call
from tests.parsers.hard_cases import HardCase, tool

_STRING: Final = {"type": "string"}

HELD_OUT_TOOLS: Final = (
    tool(
        "forecast",
        city=_STRING,
        days={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        unit={"type": ["string", "null"]},
        hourly={"type": "boolean"},
        stations={"anyOf": [{"type": "array", "items": _STRING}, {"type": "null"}]},
        area={"type": "object"},
    ),
    tool("shell", command=_STRING, timeout={"type": "number"}),
    tool("read-file", path=_STRING),
    tool("fs.stat", path=_STRING),
    tool("done"),
)

ONE_TOOL: Final = HELD_OUT_TOOLS[:1]


def _case(
    name: str,
    family: str,
    text: str,
    *items: str | Call,
    tools: tuple[dict[str, Any], ...] = HELD_OUT_TOOLS,
    **more: Any,
) -> HardCase:
    return HardCase(name, family, text, items, tools=tools, **more)


def forecast(**arguments: Any) -> Call:
    return Call("forecast", arguments)


def shell(command: str, **arguments: Any) -> Call:
    return Call("shell", {"command": command, **arguments})


_GEMMA: Final = (
    _case("the turn's end closes the call", "gemma4", '<|tool_call>call:shell{command:<|"|>ninja -v<|"|>}<turn|>', shell("ninja -v")),
    _case("no opening marker behind reasoning", "gemma4", '<|channel>thought\nLook into it.\n<channel|>call:shell{command:<|"|>cat a.c<|"|>}', shell("cat a.c"), reasoning="Look into it."),
    _case("a colon too many", "gemma4", '<|tool_call>:call:shell{command:<|"|>tox<|"|>}<tool_call|>', shell("tox")),
    _case("keys between quotes, nested", "gemma4", '<|tool_call>call:forecast{area:{box:{<|"|>7<|"|>:<|"|>north<|"|>}}}<tool_call|>', forecast(area={"box": {"7": "north"}})),
    _case("a number with a dot at its end", "gemma4", '<|tool_call>call:shell{command:<|"|>x<|"|>,timeout:90.}<tool_call|>', shell("x", timeout=90)),
    _case("brackets in strings of arrays", "gemma4", '<|tool_call>call:forecast{stations:[<|"|>x]y<|"|>,<|"|>z}<|"|>]}<tool_call|>', forecast(stations=["x]y", "z}"])),
    _case("an empty value at the end", "gemma4", "<|tool_call>call:forecast{city:}<tool_call|>", forecast(city="")),
    _case("a hyphen in a name", "gemma4", '<|tool_call>call:read-file{path:<|"|>/etc/hosts<|"|>}<tool_call|>', Call("read-file", {"path": "/etc/hosts"})),
    _case("a dot in a name", "gemma4", '<|tool_call>call:fs.stat{path:<|"|>/<|"|>}<tool_call|>', Call("fs.stat", {"path": "/"})),
)  # fmt: skip

_QWEN: Final = (
    _case("nullable types by their alternatives", "qwen3_coder", "<tool_call>\n<function=forecast>\n<parameter=days>\n7\n</parameter>\n<parameter=unit>\nkelvin\n</parameter>\n<parameter=stations>\n[\"A\", \"B\"]\n</parameter>\n</function>\n</tool_call>", forecast(days=7, unit="kelvin", stations=["A", "B"])),
    _case("null of a nullable array", "qwen3_coder", "<tool_call>\n<function=forecast>\n<parameter=stations>\nnull\n</parameter>\n</function>\n</tool_call>", forecast(stations=None)),
    _case("an end of a parameter is missing", "qwen3_coder", "Now then:\n<tool_call>\n<function=forecast>\n<parameter=city>\nOslo\n<parameter=unit>\nkelvin\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", "Now then:", forecast(city="Oslo", unit="kelvin", days=2)),
    _case("values without lines of their own", "qwen3_coder", "<tool_call>\n<function=forecast>\n<parameter=city>Oslo</parameter>\n<parameter=hourly>True</parameter>\n</function>\n</tool_call>", forecast(city="Oslo", hourly=True)),
    _case("all on one line", "qwen3_coder", "<tool_call><function=forecast><parameter=city>Oslo</parameter></function></tool_call>", forecast(city="Oslo")),
    _case("an object over two lines", "qwen3_coder", "<tool_call>\n<function=forecast>\n<parameter=area>\n{\"north\": 61,\n \"south\": 59}\n</parameter>\n</function>\n</tool_call>", forecast(area={"north": 61, "south": 59})),
    _case("an empty value", "qwen3_coder", "<tool_call>\n<function=forecast>\n<parameter=city></parameter>\n</function>\n</tool_call>", forecast(city="")),
)  # fmt: skip

_KIMI: Final = (
    _case("a number in place of a name", "kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>', forecast(city="Oslo"), tools=ONE_TOOL),
    _case("a number in place of a name, of several", "kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>', shell("ls")),
    _case("a name without a prefix", "kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>shell:4<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>', shell("ls")),
    _case("spaces around everything", "kimi_k2", 'So: <|tool_calls_section_begin|> <|tool_call_begin|> functions.shell:0 <|tool_call_argument_begin|> {"command": "ls"} <|tool_call_end|> <|tool_calls_section_end|>', "So:", shell("ls")),
    _case("an empty section", "kimi_k2", "Nothing to do.<|tool_calls_section_begin|><|tool_calls_section_end|>", "Nothing to do."),
    _case("words in the section", "kimi_k2", 'So:<|tool_calls_section_begin|> hmm <|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>', "So:", shell("ls")),
    _case("cut in the arguments", "kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>{"command": "l', unfinished=("shell",)),
)  # fmt: skip

_PYTHON: Final = (
    _case("words of JSON", "olmo3", "<function_calls>forecast(city='Oslo', days=null, hourly=true)</function_calls>", forecast(city="Oslo", days=None, hourly=True)),
    _case("a backslash that escapes nothing", "lfm2", r'<|tool_call_start|>[shell(command="grep \d+")]<|tool_call_end|>', shell(r"grep \d+")),
    _case("JSON in place of Python", "lfm2", '<|tool_call_start|>[{"name": "shell", "arguments": {"command": "ls"}}]<|tool_call_end|>', shell("ls")),
    _case("JSON with parameters", "lfm2", '<|tool_call_start|>[{"name": "shell", "parameters": {"command": "ls"}}]<|tool_call_end|>', shell("ls")),
    _case("one object", "lfm2", '<|tool_call_start|>{"name": "shell", "arguments": {"command": "ls"}}<|tool_call_end|>', shell("ls")),
    _case("a raw newline in a string", "lfm2", "<|tool_call_start|>[shell(command='cd /\nls')]<|tool_call_end|>", shell("cd /\nls")),
    _case("a zero character in a string", "lfm2", "<|tool_call_start|>[shell(command='a\0b')]<|tool_call_end|>", shell("a\0b")),
    _case("quotes in quotes", "lfm2", "<|tool_call_start|>[shell(command='awk '{print 1}' f')]<|tool_call_end|>", shell("awk '{print 1}' f")),
    _case("nothing between the markers", "lfm2", "<|tool_call_start|><|tool_call_end|>"),
)  # fmt: skip

_OTHERS: Final = (
    _case("no end marker at the end", "hermes", '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}', shell("ls")),
    _case("arguments that were serialised twice", "hermes", '<tool_call>\n{"name": "shell", "arguments": "{\\"command\\": \\"ls\\"}"}\n</tool_call>', shell("ls")),
    _case("an element that closes itself", "deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="done"/>\n</｜DSML｜tool_calls>', Call("done", {})),
    _case("an element that closes itself, behind another", "deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="shell">\n<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="done"/>\n</｜DSML｜tool_calls>', shell("ls"), Call("done", {})),
    _case("a newline behind the name only", "glm47", "<tool_call>forecast\n<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", forecast(city="Oslo")),
)  # fmt: skip

HELD_OUT: Final = (*_GEMMA, *_QWEN, *_KIMI, *_PYTHON, *_OTHERS)
