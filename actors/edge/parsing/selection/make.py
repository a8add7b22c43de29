"""Making a parser for one answer."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from headwater.actors.edge.parsing.events import OutputParser
from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.output import Output
from headwater.actors.edge.parsing.grammar.reader import WHITESPACE, Reader
from headwater.actors.edge.parsing.grammar.regions import GrammarParser, Regions
from headwater.actors.edge.parsing.grammar.response_template import ResponseTemplate, TemplateRegions
from headwater.actors.edge.parsing.selection.names import RESPONSE_TEMPLATE
from headwater.actors.edge.parsing.tools import offered_tools

F = TypeVar("F")


class MissingFormat(ValueError):
    """There is no such format: a newer worker may have named it, or the model's template was not given."""


def make_parser(
    tool_format: str,
    reasoning_format: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    parse_tools: bool,
    parse_reasoning: bool,
    starts_in_reasoning: bool,
    response_template: ResponseTemplate | None = None,
) -> OutputParser:
    """Return a parser for one answer. Raises `MissingFormat`.

    The formats are keys of TOOL_FORMATS and REASONING_FORMATS, `response_template` (then that must be given), or ""
    for none. `tools` are the definitions that the request offers, in the form of any API: XML formats cast arguments by
    their schemas, and formats without markers recognise calls by their names. Without `parse_tools` calls are text;
    without `parse_reasoning` reasoning is text, with its markers. `starts_in_reasoning`: the prompt ends inside
    reasoning.
    """
    if RESPONSE_TEMPLATE in (tool_format, reasoning_format) and response_template is None:
        raise MissingFormat("the format response_template needs the model's response_template")
    reader = Reader()
    offered = offered_tools(tools)
    if response_template is not None and tool_format in ("", RESPONSE_TEMPLATE):
        parse_tools = parse_tools and bool(tool_format)
        parse_reasoning = parse_reasoning and bool(reasoning_format)
        out = Output(WHITESPACE, WHITESPACE, parse_reasoning=parse_reasoning)
        template_grammar = TemplateRegions(
            Context(reader, out, offered, parse_tools=parse_tools),
            response_template,
            parse_tools=parse_tools,
            parse_reasoning=parse_reasoning,
        )
        return GrammarParser(reader, out, template_grammar.read(inside=starts_in_reasoning))
    tool = _named(TOOL_FORMATS, tool_format) if parse_tools else None
    if response_template is not None and reasoning_format == RESPONSE_TEMPLATE:
        # A forced call behind reasoning.
        reasoning = response_template.reasoning_format()
    else:
        reasoning = _named(REASONING_FORMATS, reasoning_format)
    reasoning_trim = reasoning.trim if reasoning is not None else ""
    out = Output(
        tool.trim if tool is not None else reasoning_trim, reasoning_trim, parse_reasoning=parse_reasoning
    )
    context = Context(reader, out, offered, parse_tools=tool is not None)
    grammar = Regions(context, tool, reasoning, parse_reasoning=parse_reasoning)
    return GrammarParser(reader, out, grammar.read(inside=starts_in_reasoning and reasoning is not None))


def _named(formats: Mapping[str, F], name: str) -> F | None:
    if not name:
        return None
    if name not in formats:
        raise MissingFormat(f"there is no format {name!r} (known: {', '.join(sorted(formats))})")
    return formats[name]


def starts_in_reasoning(
    reasoning_format: str, prompt: str, response_template: ResponseTemplate | None = None
) -> bool:
    """Return whether an answer to this rendered prompt begins inside reasoning.

    Only the prompt's end matters: its last hundred characters are enough. Text of users cannot be there.
    """
    if reasoning_format == RESPONSE_TEMPLATE:
        return response_template is not None and response_template.reasoning_at_end_of(prompt)
    reasoning = REASONING_FORMATS.get(reasoning_format)
    if reasoning is None or reasoning.starts == "never":
        return False
    end = prompt.rstrip()
    if end.endswith(reasoning.open):
        return True
    return reasoning.starts == "always" and not end.endswith(reasoning.close)
