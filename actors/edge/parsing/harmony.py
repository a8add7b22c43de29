"""Harmony, the response format of gpt-oss: messages with a header (role, recipient, channel) and a body.

The prompt ends in `<|start|>assistant`, so an answer begins inside a header. Analysis is reasoning, commentary and final
are text, and a message to `functions.<name>` is a call. The recipient may stand in the role's part of the header or in
the channel's. Messages to tools that are built into the model (`python`, `browser`) belong to its reasoning.
"""

import re
from dataclasses import dataclass
from typing import Final

from headwater.actors.edge.parsing.context import Context
from headwater.actors.edge.parsing.json_value import copy_value
from headwater.actors.edge.parsing.reader import Steps, Write, markers

_START: Final = markers("<|start|>")
_HEADER_BEGINS: Final = markers("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to=")
_HEADER_ENDS: Final = markers("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")
_IN_HEADER: Final = markers(*_HEADER_BEGINS.literals, *_HEADER_ENDS.literals)
_CHANNELS: Final = ("analysis", "commentary", "final")
_NEXT: Final = (
    "<|start|>",
    *(
        f"<|channel|>{channel}{rest}"
        for channel in _CHANNELS
        for rest in ("<|message|>", " to=", "<|constrain|>")
    ),
)
_BODY_ENDS: Final = markers(*_NEXT, "<|end|>", "<|call|>", "<|return|>")
_AFTER_BODY: Final = markers("<|start|>", "<|channel|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_UNFINISHED: Final = re.compile(
    r"\w*\s*(?:to=\S*?)?\s*(?:<\|channel\|>\s*\w*\s*(?:to=\S*?)?\s*(?:<\|constrain\|>)?\w*\s*)?"
)
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
            if not (yield from reader.look_after_space(_HEADER_BEGINS)):
                if reader.drop_cut(_HEADER_BEGINS):
                    return
                yield from self._copy_body(context, context.out.text.write)
                continue
            yield from reader.accept_after_space(_START)
            header, end = yield from reader.read_until(_HEADER_ENDS)
            if end == "<|message|>":
                yield from self._read_body(context, header)
                continue
            header = header if end else header[: _IN_HEADER.find_cut(header, 0)]
            if end or not _UNFINISHED.fullmatch(header):
                # A header that never comes to its body: what it says besides markup is text.
                context.out.text.write(_MARKUP.sub("", header))
                if end == "<|start|>":
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
            elif (yield from reader.look(_BODY_ENDS)):
                out.write_arguments("{}")
                out.end_call()
            yield from self._copy_body(context, out.write_trailing, cut_is_markup=True)
        else:
            channel = _CHANNEL.search(header)
            thinking = bool(recipient) or (channel is not None and channel[1] == "analysis")
            yield from self._copy_body(context, (out.reasoning if thinking else out.text).write)

    def _copy_body(self, context: Context, write: Write, *, cut_is_markup: bool = False) -> Steps[None]:
        """Copy a body up to its end: a marker behind which the next message begins, or the answer's end."""
        reader = context.reader
        while end := (yield from reader.copy_until(_BODY_ENDS, write, lambda: cut_is_markup)):
            if end in _NEXT:
                reader.at -= len(end)
                return
            if (yield from reader.look_after_space(_AFTER_BODY)) or reader.is_cut(_AFTER_BODY):
                return
            write(end)
