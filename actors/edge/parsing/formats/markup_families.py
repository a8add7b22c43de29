"""Calls as markup with parameters, in the forms of single families."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ToolFormat
from headwater.actors.edge.parsing.grammar.headed_calls import ByFirstCharacter, Header
from headwater.actors.edge.parsing.grammar.json_calls import JsonCalls
from headwater.actors.edge.parsing.grammar.reader import WHITESPACE
from headwater.actors.edge.parsing.grammar.xml_calls import XmlCalls

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
