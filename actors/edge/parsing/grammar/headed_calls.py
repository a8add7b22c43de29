"""Calls as a header with the name, then the arguments as JSON: DeepSeek, Kimi K2, Mistral."""

import re
from dataclasses import dataclass

from headwater.actors.edge.parsing.grammar.context import CallGrammar, Context
from headwater.actors.edge.parsing.grammar.json_value import copy_value
from headwater.actors.edge.parsing.grammar.reader import Steps, markers


@dataclass(frozen=True, slots=True)
class Header:
    """Text up to one of the markers `ends`, of the form `pattern`, whose groups have names."""

    ends: tuple[str, ...]
    pattern: str

    def read(self, context: Context) -> Steps[tuple[re.Match[str] | None, str]]:
        """Read the header and the marker that ends it; return the match, None if the text is something else."""
        text, end = yield from context.reader.read_until(markers(*self.ends))
        return (re.fullmatch(self.pattern, text, re.DOTALL) if end else None), end


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """A header whose pattern has the groups `name` and, where the model writes one, `id`; then a JSON object.

    Of arguments that are not JSON everything up to `close` is passed on.
    """

    header: Header
    close: tuple[str, ...] = ()

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read one call."""
        reader, out = context.reader, context.out
        found, end = yield from self.header.read(context)
        if end == "{":
            reader.at -= 1
        if found is None or (yield from reader.skip_space()) != "{":
            context.abandon()
            return
        reader.take_record()
        out.start_call(found["name"], found.groupdict().get("id") or "")
        close = markers(*self.close)
        if (yield from copy_value(reader, out.write_arguments)):
            out.end_call()
            yield from reader.accept_after_space(close)
        else:
            yield from reader.copy_until(close, out.write_arguments)


@dataclass(frozen=True, slots=True)
class ByFirstCharacter:
    """Two forms behind one marker: `json` if a bracket or brace follows, `otherwise` if not."""

    json: CallGrammar
    otherwise: CallGrammar

    def read(self, context: Context, marker: str) -> Steps[None]:
        """Read the calls in whichever form they have."""
        first = yield from context.reader.skip_space()
        grammar = self.json if first in ("[", "{") else self.otherwise
        yield from grammar.read(context, marker)
