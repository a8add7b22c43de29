"""The parser: one answer's text through the grammar of its format."""

from collections.abc import Generator
from typing import Final

from headwater.actors.edge.parsing.events import OutputEvent
from headwater.actors.edge.parsing.grammar.context import Context
from headwater.actors.edge.parsing.grammar.format import ReasoningFormat, ToolFormat
from headwater.actors.edge.parsing.grammar.output import Output
from headwater.actors.edge.parsing.grammar.reader import Reader, Steps, markers


class GrammarParser:
    """An `OutputParser` that resumes a grammar with each piece of text."""

    __slots__ = ("_grammar", "_out", "_reader")

    def __init__(self, reader: Reader, out: Output, grammar: Steps[None]) -> None:
        self._reader: Final = reader
        self._out: Final = out
        self._grammar: Generator[None, None, None] | None = grammar

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of the answer and return the events it completes."""
        if text:
            self._reader.feed(text)
            self._resume()
        return self._out.take()

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events."""
        self._reader.ended = True
        self._resume()
        return self._out.take()

    def _resume(self) -> None:
        if self._grammar is not None:
            try:
                next(self._grammar)
            except StopIteration:
                self._grammar = None


class Regions:
    """Reads an answer of text, reasoning and calls.

    Reasoning opens at the beginning of text only: a marker of it further on is text about reasoning. Without
    `parse_reasoning` reasoning is text too, with its markers, but nothing in it opens a call.
    """

    __slots__ = ("_calls", "_context", "_in_reasoning", "_in_text", "_reasoning", "_show", "_whole")

    def __init__(
        self,
        context: Context,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        parse_reasoning: bool,
    ) -> None:
        self._context: Final = context
        self._reasoning: Final = reasoning if reasoning is not None else ReasoningFormat(open=(), close=())
        self._calls: Final = tools.calls if tools is not None else {}
        self._whole: Final = tools.whole if tools is not None and tools.whole else self._reasoning.whole
        framing = (*self._reasoning.framing, *(tools.framing if tools is not None else ()))
        ends = (*self._reasoning.ends_before, *(tools.end_reasoning if tools is not None else ()))
        self._in_text: Final = markers(*self._calls, *framing, *self._reasoning.open, *self._reasoning.close)
        self._in_reasoning: Final = markers(*self._reasoning.close, *ends)
        self._show: Final = not parse_reasoning

    def read(self, *, inside: bool) -> Steps[None]:
        """Read the answer. `inside`: it begins inside reasoning."""
        reader, out = self._context.reader, self._context.out
        opens = markers(*self._reasoning.open)
        if inside:
            # The template opened the reasoning; the model may open it again.
            opened = yield from reader.accept_after_space(opens)
            yield from self._read_reasoning(opened)
        elif self._whole is not None and (opened := (yield from reader.accept_after_space(opens))):
            yield from self._read_reasoning(opened)
        if self._whole is not None:
            reader.record()
            yield from self._whole.read(self._context, "")
        while marker := (yield from reader.copy_until(self._in_text, out.text.write)):
            if marker in self._calls:
                yield from self._read_call(marker)
            elif marker in self._reasoning.open or marker in self._reasoning.close:
                if out.text.written:
                    out.text.write(marker)
                elif marker in self._reasoning.open:
                    yield from self._read_reasoning(marker)
                elif self._show:
                    out.text.write(marker)
                else:
                    out.text.drop_held()
            else:
                out.text.drop_held()
        if not out.calls or out.text.written:
            out.text.keep_held()

    def _read_call(self, marker: str) -> Steps[None]:
        reader, out = self._context.reader, self._context.out
        reader.at -= len(marker)
        reader.record()
        reader.at += len(marker)
        before = out.calls
        yield from self._calls[marker].read(self._context, marker)
        if out.calls > before:
            out.text.start()

    def _read_reasoning(self, opened: str) -> Steps[None]:
        reader, out = self._context.reader, self._context.out
        if self._show:
            out.text.keep_held()
            out.reasoning.write(opened)
        out.text.drop_held()
        out.reasoning.start("" if self._show else self._reasoning.trim)
        marker = yield from reader.copy_until(self._in_reasoning, out.reasoning.write)
        if not marker:
            out.reasoning.keep_held()
            return
        out.reasoning.drop_held()
        if marker not in self._reasoning.close:
            reader.at -= len(marker)
        elif self._show:
            out.reasoning.write(marker)
        out.text.start("" if self._show else self._reasoning.trim)
