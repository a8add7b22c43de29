"""The formats of tool calls and reasoning, as data, by name."""

from collections.abc import Mapping
from typing import Final

from headwater.actors.edge.parsing import regions
from headwater.actors.edge.parsing.grammar import ReasoningFormat, ToolFormat
from headwater.actors.edge.parsing.json_calls import (
    ByFirstCharacter,
    Harmony,
    HeadedCalls,
    Header,
    JsonCalls,
    KeyedCalls,
)
from headwater.actors.edge.parsing.markup_calls import XmlCalls
from headwater.actors.edge.parsing.reader import WHITESPACE
from headwater.actors.edge.parsing.rewritten_calls import GemmaCalls, PythonicCalls

_JSON: Final = JsonCalls(close=("</tool_call>",))
_QWEN_ENDS_REASONING: Final = ("<tool_call>\n<function=",)
_JSON_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")
_NAMED_TYPES: Final = {kind: frozenset({kind}) for kind in _JSON_TYPES}
_ANY_BUT_STRING: Final = frozenset(_JSON_TYPES) - {"string"}
_DEEPSEEK_FRAMING: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_ENDS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")


def _json_between(opening: str, closing: str, *, adjacent: bool = False) -> ToolFormat:
    """Calls as JSON objects between two markers."""
    calls = JsonCalls(close=(closing,), adjacent=adjacent)
    return ToolFormat(calls={opening: calls}, framing=(closing,), trim=WHITESPACE)


def _hunyuan(suffix: str) -> tuple[str, XmlCalls]:
    """The marker and the markup of Hunyuan 3, whose released tokenizer has a suffix in each name."""

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    return tag("tool_call"), XmlCalls(
        name=Header(ends=(tag("tool_sep"),), pattern=r"\s*(?P<name>[^\s<>]+)\s*"),
        parameter=tag("arg_key"),
        key=Header(ends=(tag("arg_value"),), pattern=rf"\s*(?P<key>.*?)\s*</arg_key{suffix}>\s*"),
        value_end=tag("/arg_value"),
        close=(tag("/tool_call"),),
    )


def _qwen(marker: str, end_reasoning: tuple[str, ...], *, newlines: bool = True) -> ToolFormat:
    """The markup of Qwen 3 Coder between `<marker>` and `</marker>`, of which the first may be missing."""
    end = f"</{marker}>"
    call = XmlCalls(
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
    return ToolFormat(
        calls={f"<{marker}>": call, "<function=": call}, framing=(end,), end_reasoning=end_reasoning
    )


def _dsml(space: str) -> XmlCalls:
    """DeepSeek's markup language. Its later form has a space before each element's name."""
    return XmlCalls(
        name=Header(ends=('">', '"/>'), pattern=r"(?P<name>[^\s\"<>]+)"),
        parameter=f'<｜DSML｜{space}parameter name="',
        key=Header(ends=(">",), pattern=r"(?P<key>[^\"]+)\"(?:\s+string=\"(?P<type>true|false)\")?\s*"),
        value_end=f"</｜DSML｜{space}parameter>",
        close=(f"</｜DSML｜{space}invoke>",),
        types={"true": frozenset({"string"}), "false": _ANY_BUT_STRING},
    )


def _dsml_framing(name: str) -> tuple[str, ...]:
    return (f"<｜DSML｜{name}>", f"</｜DSML｜{name}>")


# All formats by name.

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    # `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, and many fine-tunes.
    "hermes": _json_between("<tool_call>", "</tool_call>"),
    # `{"name": …, "parameters": {…}}` without markers, or after `<|python_tag|>`; several separated by `;`: Llama 3.
    "llama3_json": ToolFormat(
        calls={
            "<|python_tag|>": JsonCalls(separators=(";", ",")),
            "{": JsonCalls(separators=(";", ","), strict=True),
        },
        framing=("<|eom_id|>",),
        trim="\n",
    ),
    # `[name(key='…')]`, bare or between markers: Llama 4, OLMo 3.
    "pythonic": ToolFormat(
        calls={
            "[": PythonicCalls(strict=True),
            "<|python_start|>": PythonicCalls(close=("<|python_end|>",)),
            "<function_calls>": PythonicCalls(close=("</function_calls>",)),
        },
        framing=("<|python_end|>", "</function_calls>"),
        trim=" \n",
    ),
    # `[TOOL_CALLS]` with an array of objects (up to 2024), or with `name[CALL_ID]id[ARGS]{…}` for each call: Mistral.
    "mistral": ToolFormat(
        calls={
            "[TOOL_CALLS]": ByFirstCharacter(
                json=JsonCalls(),
                otherwise=HeadedCalls(
                    header=Header(
                        ends=("[ARGS]", "{"),
                        pattern=r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?",
                    ),
                    close=(),
                ),
            )
        },
        trim="",
    ),
    # `function<｜tool▁sep｜>name` and the arguments in a fenced block: DeepSeek V3 and R1.
    "deepseek_v3": ToolFormat(
        calls={
            "<｜tool▁call▁begin｜>": HeadedCalls(
                header=Header(
                    ends=("```json", "{"),
                    pattern=r"\s*(?:function)?\s*<｜tool▁sep｜>\s*(?P<name>[^\s`{]+)\s*",
                ),
                close=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "```"),
            )
        },
        framing=_DEEPSEEK_FRAMING,
        end_reasoning=_DEEPSEEK_ENDS,
    ),
    # `name<｜tool▁sep｜>{…}`: DeepSeek V3.1.
    "deepseek_v31": ToolFormat(
        calls={
            "<｜tool▁call▁begin｜>": HeadedCalls(
                header=Header(ends=("<｜tool▁sep｜>",), pattern=r"\s*(?P<name>[^\s{]+)\s*"),
                close=("<｜tool▁call▁end｜>",),
            )
        },
        framing=_DEEPSEEK_FRAMING,
        end_reasoning=_DEEPSEEK_ENDS,
    ),
    # `<｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">…`: DeepSeek V3.2, V4 and V4.1.
    "deepseek_v32": ToolFormat(
        calls={'<｜DSML｜invoke name="': _dsml(""), '<｜DSML｜ invoke name="': _dsml(" ")},
        framing=(*_dsml_framing("function_calls"), *_dsml_framing("tool_calls"), *_dsml_framing(" calls")),
        end_reasoning=(
            *("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>"),
            *('<｜DSML｜invoke name="', '<｜DSML｜ invoke name="'),
        ),
    ),
    # `<tool_call><function=name><parameter=key>…`: Qwen 3 Coder and Qwen 3.5 on. The outer marker may be missing.
    "qwen3_coder": _qwen("tool_call", _QWEN_ENDS_REASONING),
    # The same, but newlines around values belong to them: MiMo.
    "mimo": _qwen("tool_call", _QWEN_ENDS_REASONING, newlines=False),
    # The same between `<seed:tool_call>` markers, and newlines belong to values: Seed-OSS.
    "seed_oss": _qwen("seed:tool_call", ("<seed:tool_call>",), newlines=False),
    # `<tool_call>name<arg_key>key</arg_key><arg_value>…`: GLM 4.5 on.
    "glm": ToolFormat(
        calls={
            "<tool_call>": XmlCalls(
                name=Header(ends=("<arg_key>", "</tool_call>"), pattern=r"\s*(?P<name>[^\s<>{}\"]+)\s*"),
                parameter="<arg_key>",
                key=Header(ends=("<arg_value>",), pattern=r"\s*(?P<key>.*?)\s*</arg_key>\s*"),
                value_end="</arg_value>",
                close=("</tool_call>",),
                missing_end={"</tool_call>": ("<tool_call>",)},
            )
        },
        framing=("</tool_call>",),
        trim=WHITESPACE,
    ),
    # `functions.name:0<|tool_call_argument_begin|>{…}`, where the header is the call's id: Kimi K2.
    "kimi_k2": ToolFormat(
        calls={
            "<|tool_call_begin|>": HeadedCalls(
                header=Header(
                    ends=("<|tool_call_argument_begin|>",),
                    pattern=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?)\s*",
                ),
                close=("<|tool_call_end|>",),
            )
        },
        framing=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
        trim="",
        end_reasoning=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ),
    # `<|open|>call tool="name"<|sep|><|open|>argument key="key" type="string"<|sep|>…`: Kimi K3.
    "kimi_k3": ToolFormat(
        calls={
            "<|open|>call ": XmlCalls(
                name=Header(ends=("<|sep|>",), pattern=r"\s*tool=\"(?P<name>[^\"<]+)\"[^<]*"),
                parameter="<|open|>argument ",
                key=Header(
                    ends=("<|sep|>",),
                    pattern=r"\s*key=\"(?P<key>[^\"]*)\"(?:\s+type=\"(?P<type>\w+)\")?[^<]*",
                ),
                value_end="<|close|>argument<|sep|>",
                close=("<|close|>call<|sep|>",),
                entities=True,
                types=_NAMED_TYPES,
            )
        },
        framing=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        trim="",
        end_reasoning=("<|open|>tools<|sep|>",),
    ),
    # `<minimax:tool_call><invoke name="name"><parameter name="key">…`: MiniMax M2.
    "minimax_m2": ToolFormat(
        calls={
            '<invoke name="': XmlCalls(
                name=Header(ends=('">', '"/>'), pattern=r"\s*(?P<name>[^\s\"<>]+)\s*"),
                parameter='<parameter name="',
                key=Header(ends=('">',), pattern=r"(?P<key>[^\"]+)"),
                value_end="</parameter>",
                close=("</invoke>",),
            )
        },
        framing=("<minimax:tool_call>", "</minimax:tool_call>"),
        end_reasoning=("<minimax:tool_call>",),
    ),
    # `<|tool_call>call:name{key:<|"|>…<|"|>}<tool_call|>`: Gemma 4.
    "gemma4": ToolFormat(
        calls={"<|tool_call>": GemmaCalls(close=("<tool_call|>",))},
        framing=("<tool_call|>", "<|tool_response>"),
        trim="",
    ),
    # Messages with channels and recipients: gpt-oss.
    "harmony": ToolFormat(whole=Harmony(), trim=""),
    # `<|tools_prefix|>[{"name": {…}}]<|tools_suffix|>`: Apertus.
    "apertus": ToolFormat(
        calls={"<|tools_prefix|>": KeyedCalls(close=("<|tools_suffix|>",))},
        framing=("<|tools_suffix|>",),
        trim=WHITESPACE,
    ),
    # `<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}]<|END_ACTION|>`: Command R7B, A and later.
    "cohere_command": ToolFormat(
        calls={"<|START_ACTION|>": JsonCalls(close=("<|END_ACTION|>",), name="tool_name", id="tool_call_id")},
        framing=("<|END_ACTION|>",),
        trim=WHITESPACE,
        end_reasoning=("<|START_ACTION|>",),
    ),
    # `<dots_function_call><invoke name="name"><parameter name="key">…`: dots.
    "dots": ToolFormat(
        calls={
            "<invoke name=": XmlCalls(
                name=Header(ends=(">",), pattern=r"\s*[\"']?(?P<name>[^\s\"'<>]+)[\"']?\s*"),
                parameter="<parameter name=",
                key=Header(ends=(">",), pattern=r"\s*[\"']?(?P<key>[^\"'<>]+?)[\"']?\s*"),
                value_end="</parameter>",
                close=("</invoke>",),
            )
        },
        framing=("<dots_function_call>", "</dots_function_call>"),
        end_reasoning=("<dots_function_call>",),
    ),
    # `<start_function_call>call:name{key:<escape>…<escape>}<end_function_call>`: FunctionGemma.
    "functiongemma": ToolFormat(
        calls={"<start_function_call>": GemmaCalls(close=("<end_function_call>",), quote="<escape>")},
        framing=("<end_function_call>", "<start_function_response>"),
        trim="",
    ),
    # `function call<|role_sep|>` or `<|function_call|>` with one object: GigaChat 3.
    "gigachat3": ToolFormat(
        calls={"function call<|role_sep|>": JsonCalls(), "<|function_call|>": JsonCalls()},
        framing=("<|message_sep|>",),
        trim=WHITESPACE,
    ),
    # `<|tool_call|>` or `<tool_call>` with an array of objects: Granite 3.
    "granite": ToolFormat(
        calls={"<|tool_call|>": JsonCalls(), "<tool_call>": _JSON}, framing=("</tool_call>",), trim=WHITESPACE
    ),
    # `<function_call> {…}` for each call: Granite 20B for function calling.
    "granite-20b-fc": ToolFormat(calls={"<function_call>": JsonCalls()}, trim=WHITESPACE),
    # `<tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>…`: Hunyuan 3.
    "hunyuan": ToolFormat(
        calls=dict(map(_hunyuan, ("", ":opensource"))),
        framing=("<tool_calls>", "</tool_calls>", "<tool_calls:opensource>", "</tool_calls:opensource>"),
        trim=WHITESPACE,
        end_reasoning=("<tool_calls>", "<tool_calls:opensource>", "<tool_call>", "<tool_call:opensource>"),
    ),
    # `<|action_start|><|plugin|>{…}<|action_end|>`: InternLM 2, Intern-S1.
    "internlm": ToolFormat(
        calls={"<|plugin|>": JsonCalls(close=("<|action_end|>",))},
        framing=("<|action_start|>", "<|action_end|>"),
        trim=WHITESPACE,
        end_reasoning=("<|action_start|>", "<|plugin|>"),
    ),
    # `<tool_calls>[…]</tool_calls>` with an array of objects: Jamba, Hunyuan A13B.
    "jamba": _json_between("<tool_calls>", "</tool_calls>"),
    # `<ifm|tool_call>` with an object, or with a name and `<ifm|arg_key>key</ifm|arg_key><ifm|arg_value>…`: K2 Horizon.
    "k2_horizon": ToolFormat(
        calls={
            "<ifm|tool_call>": ByFirstCharacter(
                json=JsonCalls(close=("</ifm|tool_call>",)),
                otherwise=XmlCalls(
                    name=Header(
                        ends=("<ifm|arg_key>", "</ifm|tool_call>"), pattern=r"\s*(?P<name>[^\s<>{}\"]+)\s*"
                    ),
                    parameter="<ifm|arg_key>",
                    key=Header(
                        ends=("<ifm|arg_value>",),
                        pattern=r"\s*(?P<key>.*?)\s*</ifm\|arg_key>\s*"
                        r"(?:<ifm\|arg_type>\s*(?P<type>\w+)[^<]*</ifm\|arg_type>\s*)?",
                    ),
                    value_end="</ifm|arg_value>",
                    close=("</ifm|tool_call>",),
                    types=_NAMED_TYPES | {"integer": frozenset({"integer"})},
                ),
            )
        },
        framing=("<ifm|tool_calls>", "</ifm|tool_calls>", "</ifm|tool_call>"),
        trim=WHITESPACE,
        end_reasoning=("<ifm|tool_calls>", "<ifm|tool_call>"),
    ),
    # `<|tool_call_start|>[name(key='…')]<|tool_call_end|>`: LFM 2.
    "lfm2": ToolFormat(
        calls={"<|tool_call_start|>": PythonicCalls(close=("<|tool_call_end|>",))},
        framing=("<|tool_call_end|>",),
        trim=" \n",
    ),
    # The format of LongCat Flash: Hermes between `<longcat_tool_call>` markers.
    "longcat": _json_between("<longcat_tool_call>", "</longcat_tool_call>"),
    # `<tool_calls>` and an object a line: MiniMax M1.
    "minimax_m1": _json_between("<tool_calls>", "</tool_calls>", adjacent=True),
    # `<TOOLCALL>[…]</TOOLCALL>` with an array of objects: Nemotron Nano 2.
    "nemotron_nano_v2": _json_between("<TOOLCALL>", "</TOOLCALL>"),
    # `Action:` and a fenced block with an array of objects: Command R and R+.
    "command_r": ToolFormat(
        calls={"Action:\n```json": JsonCalls(close=("```",), name="tool_name")}, trim=WHITESPACE
    ),
    # `<function=name>{…}</function>`: Functionary 3.1, and Llama 3.1 with tools of a user's own.
    "functionary_v31": ToolFormat(
        calls={
            "<function=": HeadedCalls(
                header=Header(ends=(">",), pattern=r"\s*(?P<name>[^\s<>{]+)\s*"), close=("</function>",)
            )
        },
        framing=("<|eom_id|>",),
    ),
    # `<function name="name"><param name="key">…</param></function>`, strings with markup or newlines in CDATA: MiniCPM5.
    "minicpm5": ToolFormat(
        calls={
            "<function": XmlCalls(
                name=Header(ends=(">",), pattern=r"\s*name=[\"'](?P<name>[^\"'<>]+)[\"']\s*"),
                parameter="<param",
                key=Header(ends=(">",), pattern=r"\s*name=[\"'](?P<key>[^\"'<>]+)[\"']\s*"),
                value_end="</param>",
                close=("</function>",),
                cdata=True,
            )
        }
    ),
    # `<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>`: Solar Open.
    "solar_open": ToolFormat(
        calls={
            "<|tool_call:begin|>": HeadedCalls(
                header=Header(
                    ends=("<|tool_call:args|>",),
                    pattern=r"\s*(?P<id>[^\s<]*)\s*<\|tool_call:name\|>\s*(?P<name>[^\s<]+)\s*",
                ),
                close=("<|tool_call:end|>",),
            )
        },
        framing=("<|tool_calls|>", "<|calls|>"),
        trim="",
        end_reasoning=("<|tool_calls|>", "<|tool_call:begin|>"),
    ),
    # `functools[…]` with an array of objects: Phi-4-mini.
    "phi4_mini_json": ToolFormat(calls={"functools[": JsonCalls()}, trim=WHITESPACE),
    # The name and JSON between `<|plamo:…:plamo|>` markers: PLaMo 3.
    "plamo3": ToolFormat(
        calls={
            "<|plamo:begin_tool_name:plamo|>": HeadedCalls(
                header=Header(
                    ends=("<|plamo:msg|>", "{"),
                    pattern=r"\s*(?P<name>[^\s<]+)\s*<\|plamo:end_tool_name:plamo\|>\s*"
                    r"<\|plamo:begin_tool_arguments:plamo\|>(?:<\|plamo:constrain\|>json)?",
                ),
                close=("<|plamo:end_tool_arguments:plamo|>",),
            )
        },
        framing=(
            *("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
            *("<|plamo:begin_tool_request:plamo|>", "<|plamo:end_tool_request:plamo|>", "<|plamo:tag|>"),
        ),
        end_reasoning=(
            *("<|plamo:begin_tool_requests:plamo|>", "<|plamo:begin_tool_request:plamo|>"),
            "<|plamo:begin_tool_name:plamo|>",
        ),
    ),
    # `<steptml:invoke name="name"><steptml:parameter name="key">…` between markers of its own: Step 3.
    "step3": ToolFormat(
        calls={
            '<steptml:invoke name="': XmlCalls(
                name=Header(ends=('">', '"/>'), pattern=r"(?P<name>[^\s\"<>]+)"),
                parameter='<steptml:parameter name="',
                key=Header(ends=('">',), pattern=r"(?P<key>[^\"]+)"),
                value_end="</steptml:parameter>",
                close=("</steptml:invoke>",),
            )
        },
        framing=(
            *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_end｜>"),
            *("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>"),
        ),
        end_reasoning=("<｜tool_calls_begin｜>",),
    ),
    # An array of objects: bare, in a fenced block, or behind markers of other formats: xLAM 2.
    "xlam": ToolFormat(
        calls={
            "[": JsonCalls(strict=True),
            "```json": JsonCalls(strict=True, close=("```",)),
            "[TOOL_CALLS]": JsonCalls(),
            "<tool_call>": _JSON,
        },
        framing=("</tool_call>",),
        trim=WHITESPACE,
    ),
    "forced_call": regions.FORCED_CALL,
    "forced_calls": regions.FORCED_CALLS,
}

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    # `<think>…</think>`: DeepSeek R1, Qwen 3, GLM, Kimi K2, MiniMax and most others.
    "think": ReasoningFormat(),
    # The same for models that never write `<think>`, though their prompt does not end in it: QwQ, early DeepSeek R1.
    "think_opened": ReasoningFormat(starts="always"),
    # `[THINK]…[/THINK]`: Magistral, Ministral. The first Magistral wrote `<think>`.
    "mistral": ReasoningFormat(open=("[THINK]", "<think>"), close=("[/THINK]", "</think>")),
    # `<|channel>thought…<channel|>`: Gemma 4.
    "gemma4": ReasoningFormat(open=("<|channel>thought",), close=("<channel|>",)),
    # `<|open|>think<|sep|>…<|close|>think<|sep|>`, and the same markers around the response: Kimi K3.
    "kimi_k3": ReasoningFormat(
        open=("<|open|>think<|sep|>",),
        close=("<|close|>think<|sep|>",),
        trim="",
        framing=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ends_before=("<|open|>response<|sep|>",),
    ),
    # The analysis channel: gpt-oss.
    "harmony": ReasoningFormat(open=(), close=(), trim="", starts="never", whole=Harmony()),
    # `<|inner_prefix|>…<|inner_suffix|>`: Apertus.
    "apertus": ReasoningFormat(open=("<|inner_prefix|>",), close=("<|inner_suffix|>",)),
    # `<|START_THINKING|>…<|END_THINKING|>`, and markers around the response: Command A and later.
    "cohere_command": ReasoningFormat(
        open=("<|START_THINKING|>",),
        close=("<|END_THINKING|>",),
        framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ends_before=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    ),
    # `<think>…</think>`, and `<response>` around what follows: ERNIE 4.5.
    "ernie45": ReasoningFormat(framing=("<response>", "</response>", "</response>\n")),
    # Two sentences in the place of markers: Granite 3.2 and 3.3.
    "granite": ReasoningFormat(
        open=("Here is my thought process:", "Here's my thought process:"),
        close=("Here is my response:", "Here's my response:"),
        trim=" \t\r\n",
    ),
    # `<think>…</think>`, with a suffix in the released tokenizer: Hunyuan 3.
    "hunyuan": ReasoningFormat(
        open=("<think>", "<think:opensource>"), close=("</think>", "</think:opensource>")
    ),
    # `<think>…</think>`, and `<answer>` around what follows: Hunyuan A13B.
    "hunyuan_a13b": ReasoningFormat(framing=("<answer>", "</answer>")),
    # A marker for each of three efforts: K2 Horizon.
    "k2_horizon": ReasoningFormat(
        open=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        close=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
    ),
    # `◁think▷…◁/think▷`: Kimi-VL Thinking.
    "kimi": ReasoningFormat(open=("◁think▷",), close=("◁/think▷",)),
    # `<|plamo:begin_think:plamo|>…<|plamo:end_think:plamo|>`: PLaMo 3.
    "plamo3": ReasoningFormat(
        open=("<|plamo:begin_think:plamo|>",),
        close=("<|plamo:end_think:plamo|>",),
        framing=("<|plamo:tag|>",),
    ),
    # `<seed:think>…</seed:think>`: Seed-OSS.
    "seed_oss": ReasoningFormat(open=("<seed:think>",), close=("</seed:think>",)),
}
