"""What a writer is: how one family of models writes an answer."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.parsers.answers import Answer, Call
from tests.parsers.drawing import draw_answer, draw_tools, often

Group = Callable[[Sequence[Call], Random], str]
"""Writes calls that stand together."""


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


@dataclass(frozen=True)
class Writer:
    """How a family writes an answer.

    `before`, `between` and `behind` say where it may write text next to calls, `separator` what it writes between text and calls.
    `typeless`: values have no types of their own. `bare`: nothing but a name or a bracket opens a call. `unsafe` matches strings that the
    format cannot tell from its markup, `markup` are pieces of it. `forgiving_end` ends a call even where its last value has no end: an answer that
    is cut off behind one in a value cannot be told from a whole one. `tokens` are markers that are single tokens in the family's vocabulary only.
    """

    name: str
    tool_format: str
    group: Group
    reasoning_format: str = "think"
    reasoning: Callable[[str], str] | None = think
    text: Callable[[str], str] = str
    inside: bool = False
    begins: str = ""
    separator: str = "\n"
    before: bool = True
    between: bool = True
    behind: bool = True
    calls_max: int = 3
    typeless: bool = False
    bare: bool = False
    unsafe: re.Pattern[str] | None = None
    markup: tuple[str, ...] = ()
    forgiving_end: str = ""
    tokens: tuple[str, ...] = ()
    vllm: str = ""
    sglang: str = ""

    def write(self, answer: Answer, rnd: Random) -> str:
        pieces: list[str] = []
        for number, part in enumerate(answer.parts):
            if number:
                pieces.append(self.separator)
            pieces.append(self.text(part) if isinstance(part, str) else self.group(part, rnd))
        text = "".join(pieces)
        if self.reasoning is not None and answer.reasoning:
            text = self.reasoning(answer.reasoning) + text
        return text.removeprefix(self.begins)


class Written(NamedTuple):
    """An answer, the tools that its request offered, and the text that a model of the family writes for it."""

    writer: Writer
    tools: list[dict[str, Any]]
    answer: Answer
    text: str


HARMONY_MARKERS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)


def markers_of(writer: Writer) -> tuple[str, ...]:
    """All markers of a family that stand outside of calls."""
    tools, reasoning = TOOL_FORMATS[writer.tool_format], REASONING_FORMATS.get(writer.reasoning_format)
    around = (*reasoning.open, *reasoning.close, *reasoning.framing) if reasoning is not None else ()
    if writer.tool_format == "harmony":
        around = HARMONY_MARKERS
    return (*tools.calls, *tools.framing, *tools.end_reasoning, *around)


def draw_written(writer: Writer, rnd: Random, *, safe: bool = True, wild: bool = False) -> Written:
    """A random answer. With `safe` it has no strings that the format cannot tell from its markup, with `wild` any names, keys and characters."""
    tools = draw_tools(rnd, wild=wild)
    answer = draw_answer(
        rnd,
        tools,
        markup=writer.markup,
        unsafe=writer.unsafe if safe else None,
        reasons=writer.reasoning is not None,
        before=writer.before,
        between=writer.between,
        behind=writer.behind,
        calls_max=writer.calls_max,
        markers=markers_of(writer),
        wild=wild,
    )
    return Written(writer, tools, answer, writer.write(answer, rnd))


def dumps(value: Any, rnd: Random) -> str:
    """JSON as models write it: mostly as Python's default with plain characters, seldom otherwise."""
    if often(rnd, 4):
        return json.dumps(value, ensure_ascii=False)
    kind = rnd.randrange(3)
    if kind == 0:
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=False, **_STYLES[kind])


_STYLES: Final[dict[int, dict[str, Any]]] = {1: {"separators": (",", ":")}, 2: {"indent": 2}}
