"""Calls as JSON objects."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ToolFormat
from headwater.actors.edge.parsing.grammar.json_calls import JsonCalls, KeyedCalls
from headwater.actors.edge.parsing.grammar.reader import WHITESPACE

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
"""As Hermes, between `<longcat_tool_call>` markers: LongCat Flash."""

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
