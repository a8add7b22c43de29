"""Calls as a header and JSON."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ToolFormat
from headwater.actors.edge.parsing.grammar.headed_calls import ByFirstCharacter, HeadedCalls, Header
from headwater.actors.edge.parsing.grammar.json_calls import JsonCalls

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
