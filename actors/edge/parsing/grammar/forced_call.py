"""The arguments of one call as the whole answer."""

from dataclasses import dataclass

from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.json_value import copy_value
from headwater.actors.edge.parsing.grammar.reader import Steps


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The arguments of the one tool that is offered."""

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read the arguments; an answer that is not an object is text."""
        reader, out = context.reader, context.out
        if (yield from reader.skip_space()) != "{" or not context.offered:
            context.give_back()
            return
        reader.take_record()
        out.start_call(next(iter(context.offered)))
        if (yield from copy_value(reader, out.write_arguments)):
            out.end_call()
            out.text.start()
