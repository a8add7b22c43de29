"""An answer decoded token by token is the text that its tokens have behind the prompt."""

import pytest
from tokenizers.decoders import DecodeStream

from headwater.actors.edge.chat_template import LiteralText
from headwater.actors.edge.tokenizer import Tokenizer
from tests.tokens.vocabularies import byte, number, small

# The first test with SmolLM2 on a machine converts the model.
pytestmark = pytest.mark.timeout(300)

KINDS = ["strips", "keeps"]


def behind(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """What tokenizers' stream gives for an answer behind a prompt, as vLLM uses it."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(tokenizer.reference, token) or "" for token in answer)


def streamed(tokenizer: Tokenizer, answer: list[int], prompt: list[int] | None = None) -> str:
    """What the edge gives, token by token."""
    decoder = tokenizer.decoder(prompt=prompt or [])
    return "".join(decoder.push((token,)) for token in answer) + decoder.flush()


@pytest.mark.parametrize("kind", ["strips", "keeps"])
def test_the_first_word_keeps_its_space(kind: str) -> None:
    """A client that appends the answer of a completion to its prompt `Hello` gets `Hello world`."""
    tokenizer = small(kind)
    prompt, answer = [number(tokenizer, "▁Hello")], [number(tokenizer, "▁world")]
    assert behind(tokenizer, prompt, answer) == " world"
    assert streamed(tokenizer, answer, prompt) == " world"


@pytest.mark.parametrize("kind", KINDS)
def test_later_words_keep_their_spaces(kind: str) -> None:
    tokenizer = small(kind)
    answer = [number(tokenizer, piece) for piece in ("Hello", "▁world", "▁▁", "▁ok", "ok")]
    assert streamed(tokenizer, answer) == "Hello world   okok"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_one_character_when_it_is_whole(kind: str) -> None:
    """Each delta has whole characters; what is left at the end is shown as U+FFFD."""
    tokenizer = small(kind)
    decoder = tokenizer.decoder()
    word = number(tokenizer, "Hello")
    face = [byte(tokenizer, value) for value in "🙂".encode()]
    assert [decoder.push((token,)) for token in [word, *face]] == ["Hello", "", "", "", "🙂"]
    assert decoder.push((face[0],)) == ""
    assert set(decoder.flush()) == {"\ufffd"}


@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
def test_control_tokens_are_left_out(kind: str) -> None:
    tokenizer = small(kind)
    end = max(tokenizer.special)
    hello = number(tokenizer, "Hello")
    assert streamed(tokenizer, [hello, end, hello]) == "HelloHello"


@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
def test_what_users_spell_is_no_control_token(kind: str) -> None:
    """Its characters are encoded one by one."""
    tokenizer = small(kind)
    for token in sorted(tokenizer.special):
        spelled = tokenizer.reference.id_to_token(token) or ""
        assert not set(tokenizer.encode_plain(spelled).tolist()) & tokenizer.special - {0}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "strips",
            marks=pytest.mark.xfail(
                strict=True, reason="each piece around a control token begins with a space, as a text does"
            ),
        ),
        "keeps",
        "smollm2",
    ],
)
async def test_a_word_with_a_control_token_in_it_is_one_word(kind: str) -> None:
    tokenizer = small(kind)
    end = tokenizer.reference.id_to_token(max(tokenizer.special)) or ""
    literal = LiteralText(tokenizer)
    ids = await literal.encode(literal.mark(f"ok{end}ok"), add_special_tokens=False)
    assert tokenizer.reference.decode(ids.tolist(), skip_special_tokens=False) == f"ok{end}ok"
