"""What a format is: data from which a parser is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.actors.edge.parsing.grammar.context import CallGrammar


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    `open` and `close` are the markers; the characters `trim` next to them belong to them. `starts` says when an
    answer begins inside reasoning: "prompt" if the rendered prompt ends inside it, "always" if the model never writes
    the opening marker. `framing` and `ends_before` are as `framing` and `end_reasoning` of tool formats, for markers that
    are there without tools as well, and so is `whole`.
    """

    open: tuple[str, ...] = ("<think>",)
    close: tuple[str, ...] = ("</think>",)
    trim: str = "\n"
    starts: str = "prompt"
    framing: tuple[str, ...] = ()
    ends_before: tuple[str, ...] = ()
    whole: CallGrammar | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    `calls` maps the markers that open calls to the grammar that reads on from there, `framing` are markers that carry
    no meaning of their own. The characters `trim` next to markers belong to them. `end_reasoning` are beginnings of
    calls that end reasoning although it was not closed.
    """

    calls: Mapping[str, CallGrammar] = field(default_factory=dict)
    framing: tuple[str, ...] = ()
    trim: str = "\n"
    end_reasoning: tuple[str, ...] = ()
    whole: CallGrammar | None = None
    """What the answer, apart from reasoning, consists of."""
