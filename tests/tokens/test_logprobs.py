"""Log probabilities of vocabularies with byte fallback and of bytes: names, bytes and offsets of tokens."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis.chat_encoder import CompletionLogprobs, logprob_entries
from headwater.actors.edge.prompt.request import PromptDetail, TokenDetail
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.schemas.inference import TokenLogprob
from tests.tokens.vocabularies import byte, number, small

# The first test with SmolLM2 on a machine converts the model.
pytestmark = pytest.mark.timeout(300)

FACE = "🙂".encode()


def detail(tokens: Sequence[int], *top: tuple[int, float]) -> TokenDetail:
    """Tokens of an answer, each with these alternatives."""
    return TokenDetail(tuple(tokens), tuple(TokenLogprob(-0.5, top) for _ in tokens))


def entries(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """The entries of a chat's tokens."""
    return logprob_entries(tokenizer, detail(tokens))


def face(kind: str) -> list[int]:
    """The tokens of a character of four bytes."""
    tokenizer = small(kind)
    if kind == "smollm2":
        return list(tokenizer.reference.encode("🙂", add_special_tokens=False).ids)
    return [byte(tokenizer, value) for value in FACE]


def joined(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    """What a client makes of the entries."""
    return b"".join(bytes(entry["bytes"]) for entry in entries(tokenizer, tokens))


@pytest.mark.parametrize("kind", ["strips", "keeps", "smollm2"])
def test_bytes_of_parts_of_a_character_are_the_character(kind: str) -> None:
    """OpenAI: the bytes of several tokens are to be joined where one token is no whole character."""
    assert joined(small(kind), face(kind)) == FACE


@pytest.mark.parametrize("kind", ["strips", "keeps", "smollm2"])
def test_bytes_and_names_have_the_space(kind: str) -> None:
    tokenizer = small(kind)
    tokens = [number(tokenizer, "Hello"), number(tokenizer, "Ġworld" if kind == "smollm2" else "▁world")]
    assert joined(tokenizer, tokens) == b"Hello world"
    assert [entry["token"] for entry in entries(tokenizer, tokens)] == ["Hello", " world"]


@pytest.mark.parametrize("kind", ["strips", "keeps", "smollm2"])
def test_offsets_are_places_in_the_text(kind: str) -> None:
    """What follows a character of several tokens begins behind that one character."""
    tokenizer = small(kind)
    hello = number(tokenizer, "Hello")
    document = CompletionLogprobs(tokenizer).answer(detail([hello, *face(kind), hello]))
    text = "Hello🙂Hello"
    assert document["text_offset"][-1] == text.rindex("Hello")


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    """As without a stream."""
    tokenizer = small("smollm2")
    tokens = tokenizer.reference.encode("Hello world, naïve", add_special_tokens=False).ids
    whole = CompletionLogprobs(tokenizer).answer(detail(tokens))
    pieces = CompletionLogprobs(tokenizer)
    found = [pieces.answer(detail([token]))["text_offset"][0] for token in tokens]
    assert found == whole["text_offset"]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("strips", "▁ok", "ok"), ("keeps", "<0xF0>", "<0xE2>"), ("keeps", "▁ok", "ok")],
)
def test_no_alternative_hides_another(kind: str, first: str, second: str) -> None:
    """Two tokens with one name: the more likely one has it, at least."""
    tokenizer = small(kind)
    top = ((number(tokenizer, first), -0.1), (number(tokenizer, second), -3.0))
    document = CompletionLogprobs(tokenizer).answer(detail([top[0][0]], *top))
    assert max(document["top_logprobs"][0].values()) == -0.1


def test_the_chosen_token_is_among_the_alternatives() -> None:
    """OpenAI: "The API will always return the logprob of the sampled token", so that there may be one more than asked for."""
    tokenizer = small("smollm2")
    hello = number(tokenizer, "Hello")
    other = TokenDetail((hello,), (TokenLogprob(-4.0, ((number(tokenizer, "Ġworld"), -0.1),)),))
    assert CompletionLogprobs(tokenizer).answer(other)["top_logprobs"][0] == {" world": -0.1, "Hello": -4.0}


def test_without_alternatives_there_are_log_probabilities() -> None:
    """`logprobs: 0`: those of the chosen tokens."""
    tokenizer = small("smollm2")
    document = CompletionLogprobs(tokenizer).answer(detail([number(tokenizer, "Hello")]))
    assert (document["tokens"], document["token_logprobs"]) == (["Hello"], [-0.5])
    assert msgspec.json.encode(document)


@pytest.mark.parametrize("kind", ["strips", "keeps"])
def test_offsets_of_an_echo_are_places_in_the_prompt(kind: str) -> None:
    """The prompt's text has neither the token before it nor the space that its first token begins with."""
    tokenizer = small(kind)
    first, world = number(tokenizer, "<s>"), number(tokenizer, "▁world")
    text = "world" + "🙂" + " world"
    tokens = (first, world, *face(kind), world)
    writer = CompletionLogprobs(tokenizer)
    none = (None, *(TokenLogprob(-0.5, ()) for _ in tokens[1:]))
    document = writer.prompt(PromptDetail(text, tokens, none))
    assert [document["text_offset"][at] for at in (0, 1, 2, -1)] == [0, 0, 5, 6]
    assert writer.answer(detail([world]))["text_offset"] == [len(text)]


def test_offsets_of_an_echo_that_spells_a_special_token() -> None:
    tokenizer = small("keeps")
    first, hello = number(tokenizer, "<s>"), number(tokenizer, "Hello")
    prompt = PromptDetail("<s>Hello", (first, hello), (None, TokenLogprob(-0.5, ())))
    assert CompletionLogprobs(tokenizer).prompt(prompt)["text_offset"] == [0, 3]
