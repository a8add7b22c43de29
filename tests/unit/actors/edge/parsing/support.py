"""Feeding parsers in pieces of any size."""

from collections.abc import Iterable, Sequence
from typing import Any

from headwater.actors.edge.parsing.grammar import ParsedOutput, collect
from headwater.actors.edge.parsing.response_template import ResponseTemplate
from headwater.actors.edge.parsing.selection import make_parser


def parse_pieces(
    pieces: Iterable[str],
    tool_format: str,
    reasoning_format: str = "",
    *,
    tools: Sequence[dict[str, Any]] = (),
    inside: bool = False,
    template: ResponseTemplate | None = None,
) -> ParsedOutput:
    """The whole that the events of these pieces make."""
    parser = make_parser(
        tool_format, reasoning_format, tools=tools, starts_in_reasoning=inside, response_template=template
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return collect([*events, *parser.finish()])


def parse(text: str, tool_format: str, reasoning_format: str = "", **options: Any) -> ParsedOutput:
    """The whole that `text` makes, after checking that it is the same for pieces of several sizes."""
    whole = parse_pieces([text], tool_format, reasoning_format, **options)
    for size in (1, 2, 3, 4, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse_pieces(pieces, tool_format, reasoning_format, **options) == whole, f"pieces of {size}"
    return whole
