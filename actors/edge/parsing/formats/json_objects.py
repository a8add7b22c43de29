"""Calls as JSON objects."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ToolFormat
from headwater.actors.edge.parsing.grammar.json_calls import JsonCalls
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
