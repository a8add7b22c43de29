"""Harmony, the response format of gpt-oss: messages with a header (role, recipient, channel) and a body.

The prompt ends in `<|start|>assistant`, so an answer begins inside a header. Analysis is reasoning, commentary and final
are text, and a message to `functions.<name>` is a call. The recipient may stand in the role's part of the header or in
the channel's. Messages to tools that are built into the model (`python`, `browser`) belong to its reasoning.
"""

import re
from dataclasses import dataclass
from typing import Final

from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.json_value import copy_value
from headwater.actors.edge.parsing.grammar.reader import Markers, Steps

_START: Final = Markers(("<|start|>",))
_HEADER_BEGINS: Final = Markers(("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to="))
_HEADER_ENDS: Final = Markers(("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>"))
_TEXT_ENDS: Final = Markers(("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"))
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_MARKUP: Final = re.compile(r"<\|\w+\|>")
_FUNCTIONS: Final = "functions."


@dataclass(frozen=True, slots=True)
class Harmony:
    """The messages of an answer."""

    def read(self, context: Context, _marker: str) -> Steps[None]:
        """Read all messages."""
        reader = context.reader
        reader.take_record()
        while (yield from reader.peek()):
            if (yield from reader.look_after_space(_HEADER_BEGINS)):
                yield from reader.accept_after_space(_START)
                header, end = yield from reader.read_until(_HEADER_ENDS)
                if end == "<|message|>":
                    yield from self._read_body(context, header)
                    continue
                # A header that never comes to its body: what it says besides markup is text.
                context.out.text.write(_MARKUP.sub("", header))
            else:
                end = yield from reader.copy_until(_TEXT_ENDS, context.out.text.write)
            if end in ("<|start|>", "<|channel|>"):
                reader.at -= len(end)

    def _read_body(self, context: Context, header: str) -> Steps[None]:
        reader, out = context.reader, context.out
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        name = recipient.removeprefix(_FUNCTIONS)
        if context.parse_tools and recipient and (name != recipient or name in context.offered):
            out.start_call(name)
            if (yield from reader.skip_space()) == "{":
                if (yield from copy_value(reader, out.write_arguments)):
                    out.end_call()
            elif (yield from reader.look(_TEXT_ENDS)):
                out.write_arguments("{}")
                out.end_call()
            end = yield from reader.copy_until(_TEXT_ENDS, out.write_trailing)
        else:
            channel = _CHANNEL.search(header)
            thinking = bool(recipient) or (channel is not None and channel[1] == "analysis")
            write = (out.reasoning if thinking else out.text).write
            end = yield from reader.copy_until(_TEXT_ENDS, write)
        if end in ("<|start|>", "<|channel|>"):
            reader.at -= len(end)
