"""Making a parser for one answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.actors.edge.parsing.events import OutputParser
from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.output import Output
from headwater.actors.edge.parsing.grammar.reader import Reader
from headwater.actors.edge.parsing.grammar.regions import GrammarParser, Regions
from headwater.actors.edge.parsing.tools import offered_tools


def make_parser(
    tool_format: str,
    reasoning_format: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    parse_tools: bool,
    parse_reasoning: bool,
    starts_in_reasoning: bool,
) -> OutputParser:
    """Return a parser for one answer.

    The formats are keys of TOOL_FORMATS and REASONING_FORMATS, or "" for none. `tools` are the definitions that the
    request offers, in the form of any API: XML formats cast arguments by their schemas, and formats without markers
    recognise calls by their names. Without `parse_tools` calls are text; without `parse_reasoning` reasoning is text,
    with its markers. `starts_in_reasoning`: the prompt ends inside reasoning.
    """
    tool = TOOL_FORMATS[tool_format] if tool_format and parse_tools else None
    reasoning = REASONING_FORMATS[reasoning_format] if reasoning_format else None
    reader = Reader()
    out = Output(
        tool.trim if tool is not None else "",
        reasoning.trim if reasoning is not None else "",
        parse_reasoning=parse_reasoning,
    )
    context = Context(reader, out, offered_tools(tools), parse_tools=tool is not None)
    grammar = Regions(context, tool, reasoning, parse_reasoning=parse_reasoning)
    return GrammarParser(reader, out, grammar.read(inside=starts_in_reasoning and reasoning is not None))


def starts_in_reasoning(reasoning_format: str, prompt: str) -> bool:
    """Return whether an answer to this rendered prompt begins inside reasoning.

    Only the prompt's end matters: its last hundred characters are enough. Text of users cannot be there.
    """
    reasoning = REASONING_FORMATS.get(reasoning_format)
    if reasoning is None or reasoning.starts == "never":
        return False
    end = prompt.rstrip()
    if end.endswith(reasoning.open):
        return True
    return reasoning.starts == "always" and not end.endswith(reasoning.close)
