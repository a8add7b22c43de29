"""What only looks like a call is text, and a real call behind it is still read."""

from itertools import product
from random import Random

import pytest

from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from tests.parsers.answers import Answer, Call
from tests.parsers.drawing import draw_pieces, draw_wild_prose
from tests.parsers.examples import EXAMPLES, FEWER, FEWEST, TIMEOUT
from tests.parsers.hard_cases import tool
from tests.parsers.judge import problem_of, read
from tests.parsers.writers import FIRST, WRITERS
from tests.parsers.writers.writer import Writer, Written, markers_of

CALL = Call("f", {"s": "v"})

TOOLS = [tool("f", s={"type": "string"}, n={"type": "integer"})]


def own(writer: Writer) -> tuple[str, ...]:
    """The markers of a family: those that open calls, those without a meaning of their own, and those around reasoning."""
    calls, reasoning = TOOL_FORMATS[writer.tool_format], REASONING_FORMATS.get(writer.reasoning_format)
    around = (*reasoning.open, *reasoning.close, *reasoning.framing) if reasoning is not None else ()
    return tuple(dict.fromkeys((*calls.calls, *calls.end_reasoning, *calls.framing, *around)))


SENTENCES = (
    "The token {} opens a call. That is all.",
    "It writes `{}` first.",
    'Markers: "{}", and then text.',
    "{}",
    "A line:\n{}\nand more.",
)

OWN = [(name, marker) for name in FIRST.values() for marker in own(WRITERS[name])]


def check(writer: Writer, sentence: str, *, calls: bool) -> None:
    """A sentence comes back as text, and so it does with a call behind it, which is read; in pieces as well."""
    parts: tuple[str | tuple[Call, ...], ...] = (sentence, (CALL,)) if calls else (sentence,)
    answer = Answer("", parts)
    rnd = Random(1)
    written = Written(writer, TOOLS, answer, writer.write(answer, rnd))
    whole = read(writer, TOOLS, [written.text], reasons=False)
    problem = problem_of(written, whole)
    assert not problem, f"{problem}\ntext: {written.text!r}"
    assert read(writer, TOOLS, draw_pieces(rnd, written.text), reasons=False) == whole


@pytest.mark.parametrize(("name", "marker"), OWN)
def test_a_marker_of_the_format_in_prose_is_text(name: str, marker: str) -> None:
    """Alone, and before a call."""
    for sentence, calls in product(SENTENCES[:3], (False, True)):
        check(WRITERS[name], sentence.format(marker), calls=calls)


FOREIGN = [
    (name, marker)
    for name in FIRST.values()
    for marker in (
        "<tool_call>",
        "[TOOL_CALLS]",
        "<function=f>",
        "<|tool_call>",
        '<invoke name="f">',
        "<｜DSML｜",
    )
    if not any(known in marker or marker in known for known in own(WRITERS[name]))
]


@pytest.mark.parametrize(("name", "marker"), FOREIGN)
def test_a_marker_of_another_format_is_text(name: str, marker: str) -> None:
    for sentence in SENTENCES:
        check(WRITERS[name], sentence.format(marker), calls=True)


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("name", FIRST.values())
def test_prose_is_text(name: str) -> None:
    """Also with the beginnings of markers in it."""
    writer = WRITERS[name]
    for number in range(max(EXAMPLES // FEWER, min(EXAMPLES, FEWEST))):
        rnd = Random(f"prose, {name}, {number}")
        check(writer, draw_wild_prose(rnd, markers_of(writer)), calls=False)
