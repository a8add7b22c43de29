"""Stop strings over a token stream: what is shown does not depend on how the tokens were grouped."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.answer.choice import StopStringMatcher
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.engines.model_files import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer().to_str().encode())
"""One token per byte: any text can be cut anywhere."""

narrow = st.text("ab", max_size=24)
wide = st.text("aé漢🙂", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
wide_stops = st.lists(st.text("aé漢🙂", min_size=1, max_size=3), min_size=1, max_size=3)


def ids(text: str) -> tuple[int, ...]:
    """Tokens of a text, one per byte."""
    return tuple(TOKENIZER.reference.encode(text).ids)


def shown(groups: list[tuple[int, ...]], stops: list[str]) -> tuple[str, bool]:
    """What a client sees of these groups of tokens, and whether a stop string ended it."""
    answer = StopStringMatcher(TOKENIZER.decoder(), stops)
    text = ""
    for group in groups:
        text += answer.push(group)
    return text + answer.flush(), answer.stopped


def cut(tokens: tuple[int, ...], data: st.DataObject) -> list[tuple[int, ...]]:
    places = data.draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens)))
    edges = [0, *sorted(places), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(edges)]


@given(narrow, stop_lists, st.data())
def test_grouping_does_not_change_what_is_shown(text: str, stops: list[str], data: st.DataObject) -> None:
    """Frames of one token or of many: the same text, and the same end."""
    whole = shown([ids(text)], stops)
    assert shown(cut(ids(text), data), stops) == whole
    assert shown([(token,) for token in ids(text)], stops) == whole


@given(narrow, st.text("ab", min_size=1, max_size=5), st.data())
def test_one_stop_string_ends_the_answer_before_its_first_occurrence(
    text: str, stop: str, data: st.DataObject
) -> None:
    """Nothing of the stop string, nothing behind it, and everything before it is shown."""
    wanted = text.partition(stop)[0]
    assert shown(cut(ids(text), data), [stop]) == (wanted, stop in text)


@given(wide, wide_stops, st.data())
def test_stop_strings_are_texts_and_not_bytes(text: str, stops: list[str], data: st.DataObject) -> None:
    """Cuts inside of characters change nothing, and no character is shown in half."""
    text_shown, stopped = shown(cut(ids(text), data), stops)
    assert "\ufffd" not in text_shown
    assert text.startswith(text_shown)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in text_shown for stop in stops)


@given(wide, st.data())
def test_without_stop_strings_everything_is_shown_at_once(text: str, data: st.DataObject) -> None:
    """Nothing is held back but unfinished characters."""
    answer = StopStringMatcher(TOKENIZER.decoder(), [])
    assert "".join(answer.push(group) for group in cut(ids(text), data)) + answer.flush() == text
    assert not answer.stopped
    assert answer.push(ids("at once")) == "at once"


@pytest.mark.parametrize(
    ("stops", "pushed", "pieces", "rest", "stopped"),
    [
        # Text is shown as soon as it cannot be part of a stop string.
        (["END", "\n\n"], ["see E", "ng", "EN", "EN", "\n", "x\n"], ["see ", "Eng", "", "EN", "EN", "\nx"], "\n", False),
        # Half of one at the very end was none.
        (["STOP"], ["do not ST"], ["do not "], "ST", False),
        # What the engine generated before it heard of the end is not shown.
        (["STOP"], ["yes STOP no", "never"], ["yes ", ""], "", True),
        # The one that is complete first counts, also when a longer one began before it.
        (["abcd", "bc"], ["xabcd"], ["xa"], "", True),
        (["bc", "abcd"], ["xabcd"], ["xa"], "", True),
        # Of two that end together the longer is cut off: no part of any is shown.
        (["c", "abc"], ["xabc"], ["x"], "", True),
    ],
)  # fmt: skip
def test_what_is_held_back_and_what_is_shown(
    stops: list[str], pushed: list[str], pieces: list[str], rest: str, stopped: bool
) -> None:
    answer = StopStringMatcher(TOKENIZER.decoder(), stops)
    assert [answer.push(ids(text)) for text in pushed] == pieces
    assert (answer.flush(), answer.stopped) == (rest, stopped)
    assert shown([(token,) for text in pushed for token in ids(text)], stops) == (
        "".join(pieces) + rest,
        stopped,
    )


def test_unfinished_bytes_at_the_end_are_shown_as_such() -> None:
    """With and without stop strings: an answer cut by its length may end inside of a character."""
    half = ids("ok 🙂")[:-1]
    for stops in ([], ["zzz"]):
        assert shown([half], stops) == ("ok \ufffd", False)
