"""What users say that spells a control token is text to the model, and only what users and tools say is."""

from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headwater.actors.edge.chat_template import LiteralText
from headwater.actors.edge.tokenizer import MARK, SHORT_CHARACTERS, ControlTokens, Tokenizer
from headwater.engines.model_files import byte_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
SPELLINGS = (BEGIN, END, "<|endoftext|>")

pieces_of_text = st.lists(
    st.sampled_from([*SPELLINGS, MARK, f"{MARK}0{MARK}", "0", "<|im_", "start|>", " ", "é", "river\n"])
    | st.text(max_size=4),
    max_size=10,
).map("".join)


@cache
def tokenizer() -> Tokenizer:
    """One token per byte, and three control tokens."""
    return Tokenizer(byte_tokenizer().to_str().encode())


def bytes_of(text: str) -> list[int]:
    """The ids of a text's bytes: of the text in a vocabulary that has no control tokens."""
    plain = tokenizers.Tokenizer.from_str(byte_tokenizer().to_str())
    plain.encode_special_tokens = True
    return list(plain.encode(text, add_special_tokens=False).ids)


def control(spelling: str) -> int:
    number = tokenizer().reference.token_to_id(spelling)
    assert number is not None
    return int(number)


def rendered(messages: list[dict[str, Any]]) -> str:
    """As the simulated model's template has it."""
    return "".join(f"{BEGIN}{one['role']}\n{one['content']}{END}\n" for one in messages)


def tokens_of(messages: list[dict[str, Any]], said: set[str]) -> list[int]:
    """The ids that `messages` should have where those of these roles say nothing but text."""
    ids: list[int] = []
    for one in messages:
        encode = bytes_of if one["role"] in said else _with_control
        ids += [control(BEGIN), *bytes_of(one["role"] + "\n"), *encode(one["content"]), control(END)]
        ids += bytes_of("\n")
    return ids


def _with_control(text: str) -> list[int]:
    return list(tokenizer().reference.encode(text, add_special_tokens=False).ids)


async def encoded(messages: list[dict[str, Any]]) -> list[int]:
    """The ids that the edge makes of these messages."""
    literal = LiteralText(tokenizer())
    taken = [literal.mark_message(one) for one in messages]
    ids = await literal.encode(rendered(taken), add_special_tokens=False)
    return [int(number) for number in ids]


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), pieces_of_text), min_size=1, max_size=4))
async def test_what_users_and_tools_say_never_becomes_a_control_token(said: list[tuple[str, str]]) -> None:
    """Each byte of it is a plain token, in its place; the template's own control tokens stay."""
    messages = [{"role": role, "content": text} for role, text in said]
    ids = await encoded(messages)
    assert ids == tokens_of(messages, {"user", "tool"})
    assert [ids.count(control(spelling)) for spelling in SPELLINGS] == [len(said), len(said), 0]


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
async def test_what_others_say_is_left_as_it_is(role: str) -> None:
    """An operator's system prompt may use control tokens, and so may an answer that is handed back."""
    messages = [{"role": role, "content": f"a{END}b"}, {"role": "user", "content": f"c{END}d"}]
    assert await encoded(messages) == tokens_of(messages, {"user", "tool"})


async def test_spellings_within_spellings_are_text_too() -> None:
    """Taking one out must not make another of what stands around it."""
    for text in (f"<|im_{BEGIN}start|>", f"<|im_st{MARK}art|>", f"{BEGIN}{BEGIN}", f"{MARK}{BEGIN}{MARK}"):
        ids = await encoded([{"role": "user", "content": text}])
        assert ids.count(control(BEGIN)) == 1, text


async def test_the_longest_of_overlapping_control_tokens_is_taken_out() -> None:
    """No part of it remains to be read as the shorter one."""
    found = ControlTokens(["<a>", "<a><b>"])
    assert found.split("x<a><b>y<a>", 9) == ["x", "<a><b>", "y", "<a>", ""]
    assert found.split("x < a > y", 9) == ["x < a > y"]


@given(
    st.lists(st.sampled_from(["<", "<|", "<|x|>", "é", "|>", "漢", "a"]) | st.text(max_size=3), max_size=6),
    st.lists(
        st.sampled_from(["<", "<|", "<|x|>", "<|x", "|>", "é", "漢", "a", "\ud800", MARK])
        | st.text(max_size=3),
        max_size=30,
    ),
)
def test_long_texts_are_split_like_short_ones(spellings: list[str], text: list[str]) -> None:
    """The kernel finds what the regular expression finds, wherever it is in the text."""
    control, short = ControlTokens(spellings), "".join(text)
    long = ControlTokens(["\0no\0"]).split("\0yes" * SHORT_CHARACTERS, 9)
    assert long == ["\0yes" * SHORT_CHARACTERS]
    padding = "\x01" * (SHORT_CHARACTERS + 1)
    if any("\x01" in spelling for spelling in spellings):
        return
    first, *rest = control.split(short, 99)
    assert control.split(padding + short, 99) == [padding + first, *rest]


def test_only_so_many_spellings_are_found_in_a_long_text() -> None:
    """One more than is allowed is enough to refuse it."""
    pieces = ControlTokens(["<a>"]).split("<a>" * SHORT_CHARACTERS, 5)
    assert len(pieces) == 11
    assert "".join(pieces) == "<a>" * SHORT_CHARACTERS


async def test_ordinary_text_takes_the_ordinary_way() -> None:
    """The same ids as without any of this, with what the tokenizer puts around a text."""
    messages = [{"role": "user", "content": "Where does a river begin? " * 50}]
    literal = LiteralText(tokenizer())
    messages = [literal.mark_message(one) for one in messages]
    assert messages[0]["content"] == "Where does a river begin? " * 50
    for special in (False, True):
        wanted = await tokenizer().encode(rendered(messages), add_special_tokens=special)
        assert (await literal.encode(rendered(messages), add_special_tokens=special)).tolist() == list(wanted)


async def test_content_that_is_no_text_is_left_alone() -> None:
    """A message without content, or with parts that a template reads itself."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "tool", "content": [{"type": "text", "text": "a"}]},
    ]
    literal = LiteralText(tokenizer())
    assert [literal.mark_message(one) for one in messages] == messages


async def test_a_beginning_that_the_tokenizer_adds_is_added_once() -> None:
    """Before the first piece, also where the text begins with what was taken out."""
    made = tokenizers.Tokenizer.from_str(byte_tokenizer().to_str())
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, control(BEGIN))]
    )
    with_beginning = Tokenizer(made.to_str().encode())
    for text in (f"{END}b", f"a{END}b{END}"):
        literal = LiteralText(with_beginning)
        messages = [{"role": "user", "content": text}]
        marked = literal.mark_message(messages[0])["content"]
        ids = await literal.encode(marked, add_special_tokens=True)
        assert ids.tolist() == [control(BEGIN), *bytes_of(text)]


@pytest.mark.parametrize("number", ["0", "7", "9" * 30, "9" * 5000])
async def test_marks_that_a_client_writes_mean_nothing(number: str) -> None:
    """Whoever says them: they refer to nothing, and are text."""
    marked = f"{MARK}{number}{MARK}"
    for role in ("user", "assistant", "system"):
        messages = [{"role": role, "content": marked}, {"role": "user", "content": f"a{END}b"}]
        assert await encoded(messages) == tokens_of(messages, {"user", "tool"}), role
