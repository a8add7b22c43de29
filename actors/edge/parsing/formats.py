"""The formats of tool calls and reasoning, as data, by name."""

from collections.abc import Mapping
from typing import Final

from headwater.actors.edge.parsing import markup_calls, regions
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

_DEEPSEEK_FRAMING: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")

_DEEPSEEK_ENDS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

DEEPSEEK_V3: Final = ToolFormat(
    calls={
        "<｜tool▁call▁begin｜>": HeadedCalls(
            header=Header(
                ends=("```json", "{"), pattern=r"\s*(?:function)?\s*<｜tool▁sep｜>\s*(?P<name>[^\s`{]+)\s*"
            ),
            close=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "```"),
        )
    },
    framing=_DEEPSEEK_FRAMING,
    end_reasoning=_DEEPSEEK_ENDS,
)
"""`function<｜tool▁sep｜>name` and the arguments in a fenced block: DeepSeek V3 and R1."""

DEEPSEEK_V31: Final = ToolFormat(
    calls={
        "<｜tool▁call▁begin｜>": HeadedCalls(
            header=Header(ends=("<｜tool▁sep｜>",), pattern=r"\s*(?P<name>[^\s{]+)\s*"),
            close=("<｜tool▁call▁end｜>",),
        )
    },
    framing=_DEEPSEEK_FRAMING,
    end_reasoning=_DEEPSEEK_ENDS,
)
"""`name<｜tool▁sep｜>{…}`: DeepSeek V3.1."""

KIMI_K2: Final = ToolFormat(
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
)
"""`functions.name:0<|tool_call_argument_begin|>{…}`, where the header is the call's id: Kimi K2."""

MISTRAL: Final = ToolFormat(
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
)
"""`[TOOL_CALLS]` with an array of objects (up to 2024), or with `name[CALL_ID]id[ARGS]{…}` for each call: Mistral."""

FUNCTIONARY_V31: Final = ToolFormat(
    calls={
        "<function=": HeadedCalls(
            header=Header(ends=(">",), pattern=r"\s*(?P<name>[^\s<>{]+)\s*"), close=("</function>",)
        )
    },
    framing=("<|eom_id|>",),
)
"""`<function=name>{…}</function>`: Functionary 3.1, and Llama 3.1 with tools of a user's own."""

SOLAR_OPEN: Final = ToolFormat(
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
)
"""`<|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>{…}<|tool_call:end|>`: Solar Open."""

PLAMO3: Final = ToolFormat(
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
)
"""The name and JSON between `<|plamo:…:plamo|>` markers: PLaMo 3."""


# Calls as JSON objects.

_CALL: Final = JsonCalls(close=("</tool_call>",))

HERMES: Final = ToolFormat(calls={"<tool_call>": _CALL}, framing=("</tool_call>",), trim=WHITESPACE)
"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, and many fine-tunes."""

_BARE: Final = JsonCalls(separators=(";", ","), strict=True)
_TAGGED: Final = JsonCalls(separators=(";", ","))

LLAMA3_JSON: Final = ToolFormat(
    calls={"<|python_tag|>": _TAGGED, "{": _BARE},
    framing=("<|eom_id|>",),
    trim="\n",
)
"""`{"name": …, "parameters": {…}}` without markers, or after `<|python_tag|>`; several separated by `;`: Llama 3."""

GRANITE: Final = ToolFormat(
    calls={"<|tool_call|>": JsonCalls(), "<tool_call>": _CALL}, framing=("</tool_call>",), trim=WHITESPACE
)
"""`<|tool_call|>` or `<tool_call>` with an array of objects: Granite 3."""

GRANITE_20B_FC: Final = ToolFormat(calls={"<function_call>": JsonCalls()}, trim=WHITESPACE)
"""`<function_call> {…}` for each call: Granite 20B for function calling."""

LONGCAT: Final = ToolFormat(
    calls={"<longcat_tool_call>": JsonCalls(close=("</longcat_tool_call>",))},
    framing=("</longcat_tool_call>",),
    trim=WHITESPACE,
)
"""The format of LongCat Flash: Hermes between `<longcat_tool_call>` markers."""

JAMBA: Final = ToolFormat(
    calls={"<tool_calls>": JsonCalls(close=("</tool_calls>",))}, framing=("</tool_calls>",), trim=WHITESPACE
)
"""`<tool_calls>[…]</tool_calls>` with an array of objects: Jamba, Hunyuan A13B."""

MINIMAX_M1: Final = ToolFormat(
    calls={"<tool_calls>": JsonCalls(close=("</tool_calls>",), adjacent=True)},
    framing=("</tool_calls>",),
    trim=WHITESPACE,
)
"""`<tool_calls>` and an object a line: MiniMax M1."""

NEMOTRON_NANO_V2: Final = ToolFormat(
    calls={"<TOOLCALL>": JsonCalls(close=("</TOOLCALL>",))}, framing=("</TOOLCALL>",), trim=WHITESPACE
)
"""`<TOOLCALL>[…]</TOOLCALL>` with an array of objects: Nemotron Nano 2."""

COMMAND_R: Final = ToolFormat(
    calls={"Action:\n```json": JsonCalls(close=("```",), name="tool_name")}, trim=WHITESPACE
)
"""`Action:` and a fenced block with an array of objects: Command R and R+."""

INTERNLM: Final = ToolFormat(
    calls={"<|plugin|>": JsonCalls(close=("<|action_end|>",))},
    framing=("<|action_start|>", "<|action_end|>"),
    trim=WHITESPACE,
    end_reasoning=("<|action_start|>", "<|plugin|>"),
)
"""`<|action_start|><|plugin|>{…}<|action_end|>`: InternLM 2, Intern-S1."""

PHI4_MINI: Final = ToolFormat(calls={"functools[": JsonCalls()}, trim=WHITESPACE)
"""`functools[…]` with an array of objects: Phi-4-mini."""

_MAYBE: Final = JsonCalls(strict=True)

XLAM: Final = ToolFormat(
    calls={
        "[": _MAYBE,
        "```json": JsonCalls(strict=True, close=("```",)),
        "[TOOL_CALLS]": JsonCalls(),
        "<tool_call>": _CALL,
    },
    framing=("</tool_call>",),
    trim=WHITESPACE,
)
"""An array of objects: bare, in a fenced block, or behind markers of other formats: xLAM 2."""

COHERE_COMMAND: Final = ToolFormat(
    calls={"<|START_ACTION|>": JsonCalls(close=("<|END_ACTION|>",), name="tool_name", id="tool_call_id")},
    framing=("<|END_ACTION|>",),
    trim=WHITESPACE,
    end_reasoning=("<|START_ACTION|>",),
)
"""`<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}]<|END_ACTION|>`: Command R7B, A and later."""

GIGACHAT3: Final = ToolFormat(
    calls={"function call<|role_sep|>": JsonCalls(), "<|function_call|>": JsonCalls()},
    framing=("<|message_sep|>",),
    trim=WHITESPACE,
)
"""`function call<|role_sep|>` or `<|function_call|>` with one object: GigaChat 3."""

APERTUS: Final = ToolFormat(
    calls={"<|tools_prefix|>": KeyedCalls(close=("<|tools_suffix|>",))},
    framing=("<|tools_suffix|>",),
    trim=WHITESPACE,
)
"""`<|tools_prefix|>[{"name": {…}}]<|tools_suffix|>`: Apertus."""


# Calls in notations of their own.

PYTHONIC: Final = ToolFormat(
    calls={
        "[": PythonicCalls(strict=True),
        "<|python_start|>": PythonicCalls(close=("<|python_end|>",)),
        "<function_calls>": PythonicCalls(close=("</function_calls>",)),
    },
    framing=("<|python_end|>", "</function_calls>"),
    trim=" \n",
)
"""`[name(key='…')]`, bare or between markers: Llama 4, OLMo 3."""

GEMMA4: Final = ToolFormat(
    calls={"<|tool_call>": GemmaCalls(close=("<tool_call|>",))},
    framing=("<tool_call|>", "<|tool_response>"),
    trim="",
)
"""`<|tool_call>call:name{key:<|"|>…<|"|>}<tool_call|>`: Gemma 4."""

HARMONY: Final = ToolFormat(whole=Harmony(), trim="")
"""Messages with channels and recipients: gpt-oss."""

LFM2: Final = ToolFormat(
    calls={"<|tool_call_start|>": PythonicCalls(close=("<|tool_call_end|>",))},
    framing=("<|tool_call_end|>",),
    trim=" \n",
)
"""`<|tool_call_start|>[name(key='…')]<|tool_call_end|>`: LFM 2."""

FUNCTIONGEMMA: Final = ToolFormat(
    calls={"<start_function_call>": GemmaCalls(close=("<end_function_call>",), quote="<escape>")},
    framing=("<end_function_call>", "<start_function_response>"),
    trim="",
)
"""`<start_function_call>call:name{key:<escape>…<escape>}<end_function_call>`: FunctionGemma."""


# Reasoning.

THINK: Final = ReasoningFormat()
"""`<think>…</think>`: DeepSeek R1, Qwen 3, GLM, Kimi K2, MiniMax and most others."""

THINK_OPENED: Final = ReasoningFormat(starts="always")
"""The same for models that never write `<think>`, though their prompt does not end in it: QwQ, early DeepSeek R1."""

MISTRAL_THINK: Final = ReasoningFormat(open=("[THINK]", "<think>"), close=("[/THINK]", "</think>"))
"""`[THINK]…[/THINK]`: Magistral, Ministral. The first Magistral wrote `<think>`."""

GEMMA4_THOUGHT: Final = ReasoningFormat(open=("<|channel>thought",), close=("<channel|>",))
"""`<|channel>thought…<channel|>`: Gemma 4."""

KIMI_K3_THINK: Final = ReasoningFormat(
    open=("<|open|>think<|sep|>",),
    close=("<|close|>think<|sep|>",),
    trim="",
    framing=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ends_before=("<|open|>response<|sep|>",),
)
"""`<|open|>think<|sep|>…<|close|>think<|sep|>`, and the same markers around the response: Kimi K3."""

HARMONY_ANALYSIS: Final = ReasoningFormat(open=(), close=(), trim="", starts="never", whole=Harmony())
"""The analysis channel: gpt-oss."""

SEED_THINK: Final = ReasoningFormat(open=("<seed:think>",), close=("</seed:think>",))
"""`<seed:think>…</seed:think>`: Seed-OSS."""

GRANITE_THOUGHT: Final = ReasoningFormat(
    open=("Here is my thought process:", "Here's my thought process:"),
    close=("Here is my response:", "Here's my response:"),
    trim=" \t\r\n",
)
"""Two sentences in the place of markers: Granite 3.2 and 3.3."""

ERNIE45_THINK: Final = ReasoningFormat(framing=("<response>", "</response>", "</response>\n"))
"""`<think>…</think>`, and `<response>` around what follows: ERNIE 4.5."""

HUNYUAN_A13B_THINK: Final = ReasoningFormat(framing=("<answer>", "</answer>"))
"""`<think>…</think>`, and `<answer>` around what follows: Hunyuan A13B."""

HUNYUAN_THINK: Final = ReasoningFormat(
    open=("<think>", "<think:opensource>"), close=("</think>", "</think:opensource>")
)
"""`<think>…</think>`, with a suffix in the released tokenizer: Hunyuan 3."""

K2_HORIZON_THINK: Final = ReasoningFormat(
    open=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    close=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
)
"""A marker for each of three efforts: K2 Horizon."""

COHERE_THINKING: Final = ReasoningFormat(
    open=("<|START_THINKING|>",),
    close=("<|END_THINKING|>",),
    framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ends_before=("<|START_RESPONSE|>", "<|START_TEXT|>"),
)
"""`<|START_THINKING|>…<|END_THINKING|>`, and markers around the response: Command A and later."""

PLAMO3_THINK: Final = ReasoningFormat(
    open=("<|plamo:begin_think:plamo|>",), close=("<|plamo:end_think:plamo|>",), framing=("<|plamo:tag|>",)
)
"""`<|plamo:begin_think:plamo|>…<|plamo:end_think:plamo|>`: PLaMo 3."""

APERTUS_INNER: Final = ReasoningFormat(open=("<|inner_prefix|>",), close=("<|inner_suffix|>",))
"""`<|inner_prefix|>…<|inner_suffix|>`: Apertus."""

KIMI_THINK: Final = ReasoningFormat(open=("◁think▷",), close=("◁/think▷",))
"""`◁think▷…◁/think▷`: Kimi-VL Thinking."""


# Calls as markup with parameters, in the forms of single families.

_JSON_TYPES: Final = ("string", "number", "integer", "boolean", "null", "array", "object")

DOTS: Final = ToolFormat(
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
)
"""`<dots_function_call><invoke name="name"><parameter name="key">…`: dots."""

STEP3: Final = ToolFormat(
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
)
"""`<steptml:invoke name="name"><steptml:parameter name="key">…` between markers of its own: Step 3."""


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


HUNYUAN: Final = ToolFormat(
    calls=dict(map(_hunyuan, ("", ":opensource"))),
    framing=("<tool_calls>", "</tool_calls>", "<tool_calls:opensource>", "</tool_calls:opensource>"),
    trim=WHITESPACE,
    end_reasoning=("<tool_calls>", "<tool_calls:opensource>", "<tool_call>", "<tool_call:opensource>"),
)
"""`<tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>…`: Hunyuan 3."""

K2_HORIZON: Final = ToolFormat(
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
                types={kind: frozenset({kind}) for kind in _JSON_TYPES},
            ),
        )
    },
    framing=("<ifm|tool_calls>", "</ifm|tool_calls>", "</ifm|tool_call>"),
    trim=WHITESPACE,
    end_reasoning=("<ifm|tool_calls>", "<ifm|tool_call>"),
)
"""`<ifm|tool_call>` with an object, or with a name and `<ifm|arg_key>key</ifm|arg_key><ifm|arg_value>…`: K2 Horizon."""


# All formats by name.

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": markup_calls.DEEPSEEK_V32,
    "qwen3_coder": markup_calls.QWEN3_CODER,
    "glm": markup_calls.GLM,
    "kimi_k2": KIMI_K2,
    "kimi_k3": markup_calls.KIMI_K3,
    "minimax_m2": markup_calls.MINIMAX_M2,
    "gemma4": GEMMA4,
    "harmony": HARMONY,
    "apertus": APERTUS,
    "cohere_command": COHERE_COMMAND,
    "dots": DOTS,
    "functiongemma": FUNCTIONGEMMA,
    "gigachat3": GIGACHAT3,
    "granite": GRANITE,
    "granite-20b-fc": GRANITE_20B_FC,
    "hunyuan": HUNYUAN,
    "internlm": INTERNLM,
    "jamba": JAMBA,
    "k2_horizon": K2_HORIZON,
    "lfm2": LFM2,
    "longcat": LONGCAT,
    "minimax_m1": MINIMAX_M1,
    "nemotron_nano_v2": NEMOTRON_NANO_V2,
    "command_r": COMMAND_R,
    "functionary_v31": FUNCTIONARY_V31,
    "minicpm5": markup_calls.MINICPM5,
    "solar_open": SOLAR_OPEN,
    "mimo": markup_calls.MIMO,
    "phi4_mini_json": PHI4_MINI,
    "plamo3": PLAMO3,
    "seed_oss": markup_calls.SEED_OSS,
    "step3": STEP3,
    "xlam": XLAM,
    "forced_call": regions.FORCED_CALL,
    "forced_calls": regions.FORCED_CALLS,
}

REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": THINK,
    "think_opened": THINK_OPENED,
    "mistral": MISTRAL_THINK,
    "gemma4": GEMMA4_THOUGHT,
    "kimi_k3": KIMI_K3_THINK,
    "harmony": HARMONY_ANALYSIS,
    "apertus": APERTUS_INNER,
    "cohere_command": COHERE_THINKING,
    "ernie45": ERNIE45_THINK,
    "granite": GRANITE_THOUGHT,
    "hunyuan": HUNYUAN_THINK,
    "hunyuan_a13b": HUNYUAN_A13B_THINK,
    "k2_horizon": K2_HORIZON_THINK,
    "kimi": KIMI_THINK,
    "plamo3": PLAMO3_THINK,
    "seed_oss": SEED_THINK,
}
