"""Calls in notations of their own."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ToolFormat
from headwater.actors.edge.parsing.grammar.gemma_calls import GemmaCalls
from headwater.actors.edge.parsing.grammar.harmony import Harmony
from headwater.actors.edge.parsing.grammar.pythonic_calls import PythonicCalls

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
