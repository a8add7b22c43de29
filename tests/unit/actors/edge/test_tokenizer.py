"""Text to ids and back: the fast ways give what the model's own tokenizer gives, and never half a character."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, normalizers

from headwater.actors.edge.tokenizer import INLINE_CHARACTERS_MAX, StreamDecoder, TableDecoder, Tokenizer
from headwater.engines.model_files import byte_tokenizer
from headwater.ops.start import model
from tests.support.data.examples import texts

# The first test with it on a machine converts the model.
pytestmark = pytest.mark.timeout(300)

NAMES = ["sim", "smollm2"]

numbers = st.lists(st.floats(0, 1, exclude_max=True), max_size=60)


@cache
def tokenizer(name: str) -> Tokenizer:
    """The simulator's tokenizer, SmolLM2's, or one with byte fallback, which has no byte table."""
    if name == "smollm2":
        return Tokenizer((model.ensure() / "tokenizer.json").read_bytes(), (2,))
    if name == "fallback":
        return Tokenizer(fallback_tokenizer().to_str().encode())
    return Tokenizer(byte_tokenizer().to_str().encode())


def fallback_tokenizer() -> Reference:
    """As Llama 2 has it: some characters, and <0xNN> for the bytes of all others."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcde"]
    made = Reference(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def ids_from(fractions: list[float], size: int) -> list[int]:
    return [int(fraction * size) for fraction in fractions]


def groups_of(ids: list[int], data: st.DataObject) -> list[tuple[int, ...]]:
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [tuple(ids[a:b]) for a, b in zip([0, *places], [*places, len(ids)], strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_the_fast_ways_are_taken(name: str) -> None:
    """Otherwise the tests below would compare the reference with itself."""
    made = tokenizer(name)
    assert made.table is not None
    assert isinstance(made.decoder(), TableDecoder)


@pytest.mark.parametrize("name", NAMES)
@given(fractions=numbers, data=st.data())
def test_decoding_by_table_equals_the_tokenizers_own(
    name: str, fractions: list[float], data: st.DataObject
) -> None:
    """For any ids, special ones too, in any groups: the same text, byte for byte."""
    made = tokenizer(name)
    ids = ids_from(fractions, made.vocabulary)
    decoder = made.decoder()
    text = "".join(decoder.push(group) for group in groups_of(ids, data)) + decoder.flush()
    assert text == made.reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
@given(text=texts)
def test_no_delta_has_half_a_character(name: str, text: str) -> None:
    """Token by token, what is complete is shown at once, and nothing else."""
    made = tokenizer(name)
    decoder = made.decoder()
    ids = made.reference.encode(text, add_special_tokens=False).ids
    deltas = [decoder.push((token,)) for token in ids]
    assert "".join(deltas) + decoder.flush() == made.reference.decode(ids)
    if made.reference.decode(ids) == text:
        # Not so for the few bytes that a vocabulary may lack.
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas) or "\ufffd" in text


@pytest.mark.parametrize("name", NAMES)
@given(text=texts | st.text("ab c\n\t🙂é'", max_size=30), special=st.booleans())
async def test_encoding_equals_the_tokenizers_own(name: str, text: str, special: bool) -> None:
    """Edges and engines must agree on ids: hashes are made of them."""
    made = tokenizer(name)
    ours = await made.encode(text, add_special_tokens=special)
    assert ours.tolist() == made.reference.encode(text, add_special_tokens=special).ids


@pytest.mark.parametrize("name", [*NAMES, "fallback"])
async def test_text_that_the_vocabulary_lacks_is_encoded_all_the_same(name: str) -> None:
    """A client may send any character: what has no token is left out or replaced, as the model's own does."""
    made = tokenizer(name)
    for text in ("a\x04b", "\U00040000", "\U0010ffff\x1d" * INLINE_CHARACTERS_MAX):
        ours = await made.encode(text, add_special_tokens=False)
        assert ours.tolist() == made.reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", [*NAMES, "fallback"])
async def test_long_and_controlling_texts_are_encoded_alike(name: str) -> None:
    """Off the event loop as on it, and control tokens are found wherever they stand."""
    made = tokenizer(name)
    turns = "<|im_start|>user\nabcde é 🙂<|im_end|>\n" * 8
    for text in (turns, "abc de " * INLINE_CHARACTERS_MAX, "🙂" * (INLINE_CHARACTERS_MAX + 1)):
        ours = await made.encode(text, add_special_tokens=True)
        assert ours.tolist() == made.reference.encode(text).ids


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_are_not_part_of_an_answer(name: str) -> None:
    """They are left out of the text; a log probability shows them by name."""
    made = tokenizer(name)
    end = made.reference.token_to_id("<|im_end|>")
    hello = tuple(made.reference.encode("hello").ids)
    assert end is not None
    assert made.decoder().push((end, *hello, end)) == "hello"
    assert made.text_of(end) == "<|im_end|>"
    assert made.bytes_of(end) == b"<|im_end|>"


@pytest.mark.parametrize("name", NAMES)
def test_single_tokens_show_their_text_and_their_bytes(name: str) -> None:
    """Half a character shows as U+FFFD in text, and as itself in bytes."""
    made = tokenizer(name)
    ids = made.reference.encode("\u0e53", add_special_tokens=False).ids
    assert b"".join(made.bytes_of(token) for token in ids) == "\u0e53".encode()
    assert len(ids) > 1
    assert all("\ufffd" in made.text_of(token) for token in ids)


def test_broken_bytes_do_not_hold_back_what_follows_them() -> None:
    """A character that is complete is shown at once, also behind bytes that are none."""
    made = tokenizer("sim")
    broken, euro = made.reference.token_to_id("ÿ"), tuple(made.reference.encode("€").ids)
    assert broken is not None
    assert made.bytes_of(broken) == b"\xff"
    decoder = made.decoder()
    assert decoder.push((broken, *euro)) == "\ufffd€"
    assert decoder.push((broken, *euro, *euro[:2])) == "\ufffd€"
    assert decoder.push((euro[2],)) == "€"


def test_ids_beyond_the_vocabulary_show_nothing() -> None:
    """Padded vocabularies of engines have ids that no tokenizer knows."""
    made = tokenizer("sim")
    assert made.decoder().push((made.vocabulary, made.vocabulary + 1000)) == ""


def test_two_answers_do_not_share_a_decoder() -> None:
    """What one holds back never shows in another."""
    made = tokenizer("sim")
    first, second = made.decoder(), made.decoder()
    smile = tuple(made.reference.encode("🙂").ids)
    assert first.push(smile[:2]) == ""
    assert second.push(smile) == "🙂"
    assert first.push(smile[2:]) == "🙂"


@given(text=st.text("abé漢🙂 ", max_size=20), data=st.data())
def test_without_a_table_the_stream_decodes_any_text(text: str, data: st.DataObject) -> None:
    """Vocabularies with byte fallback: every group of tokens, the same text, no half characters."""
    made = tokenizer("fallback")
    assert isinstance(made.decoder(), StreamDecoder)
    ids = made.reference.encode(text).ids
    decoder = made.decoder()
    deltas = [decoder.push(group) for group in groups_of(ids, data)]
    assert "".join(deltas) + decoder.flush() == made.reference.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


def test_without_a_table_unfinished_bytes_show_at_the_end() -> None:
    """An answer cut inside of a character ends in U+FFFD here as well, once it is flushed."""
    made = tokenizer("fallback")
    ids = made.reference.encode("a🙂").ids
    decoder = made.decoder()
    assert decoder.push(tuple(ids[:-1])) == "a"
    assert set(decoder.flush()) == {"\ufffd"}


@given(fractions=numbers)
def test_without_a_table_any_ids_can_be_streamed(fractions: list[float]) -> None:
    """A model may generate bytes that are no text: the stream shows something and goes on."""
    made = tokenizer("fallback")
    ids = ids_from(fractions, made.vocabulary)
    decoder = made.decoder()
    for token in ids:
        assert isinstance(decoder.push((token,)), str)
    assert isinstance(decoder.flush(), str)
