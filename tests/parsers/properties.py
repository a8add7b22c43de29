"""The properties of parsing, each as a function of a family and random numbers that says what is wrong.

The tests check them with a few examples, `python -m tests.parsers.search` looks for the shortest texts that break them.
"""

import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from random import Random
from typing import Final, NamedTuple

from tests.parsers.answers import Answer, Reading, loads
from tests.parsers.drawing import draw_pieces, often
from tests.parsers.judge import problem_of, problem_of_call, read_written
from tests.parsers.writers.writer import Writer, Written, draw_written, markers_of

CUTS: Final = 3
"""Places at which each answer is cut."""

LAST_MAX: Final = 12
"""Characters that are missing at most from the end of an answer that lacks its last marker."""

MARKUP: Final = frozenset("<|｜")
"""Characters that the markers inside calls are made of."""


_MARKED: Final = re.compile(r"[<|｜][^\"'\\<]*")


class Fault(NamedTuple):
    """What is wrong. `problem` is empty if nothing is."""

    problem: str
    written: Written
    text: str
    reading: Reading | None = None

    def __str__(self) -> str:
        """All that is needed to see it."""
        return f"{self.problem}\ntext: {self.text!r}\nread: {self.reading}\ntools: {self.written.tools!r}"


Property = Callable[[Writer, Random], Fault | None]


def is_read(writer: Writer, rnd: Random) -> Fault | None:
    """What was written is read, mostly in pieces."""
    written = draw_written(writer, rnd, wild=True)
    pieces = draw_pieces(rnd, written.text) if often(rnd, 4) else [written.text]
    reading = read_written(written, pieces)
    problem = problem_of(written, reading)
    return Fault(f"{problem}, pieces: {pieces}", written, written.text, reading) if problem else None


def pieces_make_no_difference(writer: Writer, rnd: Random) -> Fault | None:
    """Whole and in pieces a text has one meaning, also with strings that the format cannot tell from its markup."""
    written = draw_written(writer, rnd, safe=False, wild=True)
    pieces = draw_pieces(rnd, written.text)
    whole, other = read_written(written), read_written(written, pieces)
    return (
        None if other == whole else Fault(f"whole: {whole}, pieces: {pieces}", written, written.text, other)
    )


def cut_off_is_not_whole(writer: Writer, rnd: Random) -> Fault | None:
    """Of an answer that is cut anywhere no markup is text, no call is whole that is not, and none is invented."""
    written = draw_written(writer, rnd, wild=True)
    for _ in range(CUTS):
        cut = written.text[: len(written.text) - rnd.randrange(len(written.text))]
        reading = read_written(written, [cut])
        if problem := problem_of_cut(written, cut, reading):
            return Fault(problem, written, cut, reading)
        if read_written(written, draw_pieces(rnd, cut)) != reading:
            return Fault("pieces make a difference", written, cut, reading)
    return None


def cut_arguments_have_no_markup(writer: Writer, rnd: Random) -> Fault | None:
    """The arguments of a call that was cut off have no beginning of a marker: a client may use what it has of them."""
    written = draw_written(writer, rnd, wild=True)
    whole = read_written(written)
    for _ in range(CUTS):
        cut = written.text[: len(written.text) - rnd.randrange(len(written.text))]
        reading = read_written(written, [cut])
        for got, full in zip(reading.calls, whole.calls):
            more = leaked(got.arguments, full.arguments)
            if not got.complete and MARKUP & set(more) and not _is_begun_text(got.arguments, full.arguments):
                return Fault(f"arguments have {more!r} too much", written, cut, reading)
    return None


def _is_begun_text(got: str, full: str) -> bool:
    """Whether what looks like markup at the end is in the value itself, whose type and notation its end only shows."""
    last, values = got.rpartition('": ')[2], "".join(map(str, loads(full).values())) + full
    return all(without_space(found) in without_space(values) for found in _MARKED.findall(last))


def last_marker_may_be_missing(writer: Writer, rnd: Random) -> Fault | None:
    """Cut within the last characters, a call is whole or has no end, and nothing of its markup is text."""
    written = draw_written(writer, rnd, wild=True)
    if isinstance(written.answer.parts[-1], str):
        return None
    for missing in range(1, min(LAST_MAX, len(written.text))):
        cut = written.text[:-missing]
        reading = read_written(written, [cut])
        if problem := problem_of_cut(written, cut, reading):
            return Fault(problem, written, cut, reading)
    return None


def without_space(text: str) -> str:
    return "".join(text.split())


def leaked(got: str, meant: str) -> str:
    """What was read beyond what was meant; whitespace does not count."""
    got, meant = without_space(got), without_space(meant)
    if meant.startswith(got):
        return ""
    return got[len(list(takewhile(lambda pair: pair[0] == pair[1], zip(got, meant)))) :]


def problem_of_cut(written: Written, cut: str, reading: Reading) -> str:
    """What is wrong with the reading of an answer's beginning; "" for nothing.

    The beginning of a marker at the very end is text: nothing shows yet what it is; but directly behind a call it is markup. So is a call of a format without markers as long as
    it may be JSON or a list.
    """
    writer, answer = written.writer, written.answer
    if (
        writer.forgiving_end
        and cut.rstrip().endswith(writer.forgiving_end)
        and _has_in_value(answer, writer.forgiving_end)
    ):
        return ""
    if len(reading.calls) > len(answer.calls):
        return f"{len(reading.calls)} calls, not {len(answer.calls)}"
    for got, meant in zip(reading.calls, answer.calls):
        if got.complete and (problem := problem_of_call(got, meant, written)):
            return problem
        if got.name != meant.name:
            return f"a call of {got.name!r}, not {meant.name!r}"
    if any(not call.complete for call in reading.calls[:-1]):
        return "a call before the last has no end"
    meant_text = "".join(part for part in answer.parts if isinstance(part, str))
    for kind, got_text, meant_part in (
        ("text", reading.text, meant_text),
        ("reasoning", reading.reasoning, answer.reasoning),
    ):
        more = leaked(got_text, meant_part)
        if not more or (writer.bare and without_space(cut).endswith(more)):
            continue
        begun = _begun(got_text, meant_part, markers_of(writer))
        if not begun or (kind == "text" and len(begun) > 1 and _is_behind_a_call(reading, begun)):
            return f"{kind} has {begun or more!r} too much"
    return ""


def _has_in_value(answer: Answer, marker: str) -> bool:
    """Whether an argument of one of the answer's calls contains a marker."""
    return any(marker in str(value) for call in answer.calls for value in call.arguments.values())


def _begun(got: str, meant: str, markers: tuple[str, ...]) -> str:
    """The beginning of a marker at the end of what was read, if all before it was meant."""
    got, meant = without_space(got), without_space(meant)
    for at in range(len(got)):
        if meant.startswith(got[:at]) and any(
            without_space(marker).startswith(got[at:]) for marker in markers
        ):
            return got[at:]
    return ""


def _is_behind_a_call(reading: Reading, more: str) -> bool:
    """Whether there is nothing but `more` behind the last call."""
    *before, last = reading.items
    return (
        bool(before)
        and not isinstance(before[-1], str)
        and isinstance(last, str)
        and without_space(last) == more
    )


PROPERTIES: Final[Mapping[str, Property]] = {
    "what was written is read": is_read,
    "pieces make no difference": pieces_make_no_difference,
    "what is cut off is not whole": cut_off_is_not_whole,
    "cut arguments have no markup": cut_arguments_have_no_markup,
    "the last marker may be missing": last_marker_may_be_missing,
}
