"""What SGLang's KV events have of their own: salts, names of adapters, signed hashes, images, pairs of tokens."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from headwater.engines.kv_events import KvTranslator, MediaSentinels, decode
from headwater.schemas.hashing import chain_plain, media_digests, seed, sequence_hashes
from tests.unit.engines.test_events import SIZE, TOKENS, held_by, removed, stored

SENTINEL = 1_000_000 + (1 << 61)
PLACEHOLDER = 9


def test_salts_and_adapters_are_fields_of_an_event() -> None:
    """Not among extra keys, as vLLM's."""
    translator = KvTranslator(SIZE, sentinels=MediaSentinels())
    events = translator.translate([stored([-5, -6], cache_salt="tenant", lora_name="l@1")])
    root = seed("l@1", "tenant")
    first, second = chain_plain(TOKENS[: 2 * SIZE], SIZE, root)
    assert set(held_by(events)) == {(0, root, first), (0, first, second)}
    assert not held_by(translator.translate([removed([-6, -5])]), held_by(events))


def test_arrays_of_older_releases_are_read() -> None:
    """The first fields of vLLM's, in the same order."""
    event = ["BlockStored", [-5], None, TOKENS[:SIZE], SIZE, None, "GPU"]
    batch = decode(msgspec.msgpack.encode([1.0, [event, ["BlockRemoved", [-5], "GPU"]], 0]))
    translator = KvTranslator(SIZE, sentinels=MediaSentinels())
    assert len(translator.translate(batch.events, batch.at_s)) == 2
    assert len(translator) == 0


def numbers(seed: int) -> tuple[int, ...]:
    """What stands for an image: four numbers of 62 bits."""
    draw = random.Random(seed)
    return tuple(1_000_000 + draw.getrandbits(62) for _ in range(4))


def with_images(
    tokens: list[int], *images: tuple[str, int, int, int]
) -> tuple[MediaSentinels, list[int], list[int]]:
    """Images (id, seed, first token, tokens) in a prompt: what learned them, the tokens of an event, the blocks' names at an edge."""
    sentinels, event, prompt = MediaSentinels(), list(tokens), list(tokens)
    for id_, seed_, start, count in images:
        sentinels.learn(id_, count, numbers(seed_), PLACEHOLDER)
        prompt[start : start + count] = [PLACEHOLDER] * count
        event[start : start + count] = [numbers(seed_)[at % 4] for at in range(count)]
    digests = media_digests([(id_, start, count) for id_, _, start, count in images], SIZE)
    names = sequence_hashes(np.array(prompt, np.uint32), SIZE, multimodal=digests).tolist()
    return sentinels, event, names


def blocks_of(events: list[Any]) -> list[int]:
    """The names of stored blocks."""
    return [block for _, _, block in held_by(events)]


LONG = list(range(100, 100 + 12 * SIZE))
TWO = (("a", 1, 3, 10), ("b", 2, 14, 18))


@pytest.mark.parametrize("runs", [[12], [1, 11], [2, 1, 9], [1] * 12, [5, 7]])
def test_images_of_requests_have_the_names_of_an_edge(runs: list[int]) -> None:
    """However many blocks an event has: what begins within an image is told by the block before it."""
    sentinels, tokens, names = with_images(LONG, *TWO)
    translator = KvTranslator(SIZE, sentinels=sentinels)
    found: list[int] = []
    at = 0
    for run in runs:
        hashes: list[Any] = [*range(at + 1, at + run + 1)]
        given = tokens[at * SIZE : (at + run) * SIZE]
        found += blocks_of(translator.translate([stored(hashes, parent=at or None, tokens=given)]))
        at += run
    assert found == names
    assert (translator.unnamed, translator.orphans) == (0, 0)


def test_media_of_other_kinds_have_their_own_placeholders() -> None:
    """A video after an image: the tokens of an edge's prompt are those of each kind."""
    sentinels, event, prompt = MediaSentinels(), LONG[: 6 * SIZE], LONG[: 6 * SIZE]
    places = []
    for id_, seed_, start, count, placeholder in (("a", 1, 3, 10, 9), ("v", 2, 15, 9, 8)):
        sentinels.learn(id_, count, numbers(seed_), placeholder)
        prompt[start : start + count] = [placeholder] * count
        event[start : start + count] = [numbers(seed_)[at % 4] for at in range(count)]
        places.append((id_, start, count))
    names = sequence_hashes(np.array(prompt, np.uint32), SIZE, multimodal=media_digests(places, SIZE))
    found = KvTranslator(SIZE, sentinels=sentinels).translate([stored([*range(1, 7)], tokens=event)])
    assert blocks_of(found) == names.tolist()


def test_a_block_within_an_image_that_comes_back_keeps_its_place() -> None:
    """Removed and stored again, and continued."""
    sentinels, tokens, names = with_images(LONG, *TWO)
    translator = KvTranslator(SIZE, sentinels=sentinels)
    translator.translate([stored([1, 2], tokens=tokens[: 2 * SIZE]), removed([2])])
    second = stored([2], parent=1, tokens=tokens[SIZE : 2 * SIZE])
    third = stored([3], parent=2, tokens=tokens[2 * SIZE : 3 * SIZE])
    assert blocks_of(translator.translate([second, third])) == names[1:3]


def test_equal_images_without_a_token_in_between_are_two() -> None:
    """By the number of an image's tokens."""
    images = (("a", 1, 2, 8), ("a", 1, 10, 8))
    sentinels, tokens, names = with_images(LONG, *images)
    translator = KvTranslator(SIZE, sentinels=sentinels)
    assert blocks_of(translator.translate([stored([*range(12)], tokens=tokens)])) == names


@pytest.mark.parametrize("at", [3, 4, 12])
def test_blocks_with_other_numbers_than_a_known_image_have_no_name(at: int) -> None:
    """From the first token of an image that is unknown or not as it was learned, nor has what follows: none is ever wrong."""
    sentinels, tokens, names = with_images(LONG, *TWO)
    tokens[at] = SENTINEL
    translator = KvTranslator(SIZE, sentinels=sentinels)
    with capture_logs() as logs:
        events = translator.translate([stored([*range(12)], tokens=tokens), stored([20], parent=5)])
    assert blocks_of(events) == names[:0]
    assert (translator.unnamed, translator.orphans) == (12, 1)
    assert logs == [{"event": "kv_blocks_of_unknown_media", "log_level": "info", "blocks": 12}]


def test_blocks_before_an_unknown_image_have_names() -> None:
    """Numbers above every token id stand for parts of an image."""
    sentinels, tokens, names = with_images(LONG, TWO[0])
    tokens[14:32] = [SENTINEL] * 18
    translator = KvTranslator(SIZE, sentinels=sentinels)
    assert blocks_of(translator.translate([stored([*range(12)], tokens=tokens)])) == names[:3]
    assert translator.unnamed == 9


def test_an_image_that_goes_on_otherwise_than_it_began_has_no_name() -> None:
    """In the next event, in which its first token is not."""
    sentinels, tokens, names = with_images(LONG, *TWO)
    translator = KvTranslator(SIZE, sentinels=sentinels)
    first = stored([1], tokens=tokens[:SIZE])
    assert blocks_of(translator.translate([first])) == names[:1]
    # One token further: not where the block before it ended.
    assert not translator.translate([stored([2], parent=1, tokens=tokens[SIZE + 1 : 2 * SIZE + 1])])
    assert translator.unnamed == 1


def test_images_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the latest requests are known."""
    monkeypatch.setattr("headwater.engines.kv_events.SENTINELS_REMEMBERED", 2)
    sentinels, tokens, names = with_images(LONG, *TWO)
    sentinels.learn("a", 10, numbers(1), PLACEHOLDER)
    sentinels.learn("c", 4, numbers(3), PLACEHOLDER)
    translator = KvTranslator(SIZE, sentinels=sentinels)
    assert blocks_of(translator.translate([stored([*range(12)], tokens=tokens)])) == names[:3]
    sentinels.learn("b", 18, numbers(2), PLACEHOLDER)
    again = KvTranslator(SIZE, sentinels=sentinels)
    assert again.translate([stored([*range(12)], tokens=tokens)]) == []
    sentinels.learn("a", 10, numbers(1), PLACEHOLDER)
    assert blocks_of(again.translate([stored([*range(12)], tokens=tokens)])) == names


def test_under_eagle_tokens_come_with_their_successors() -> None:
    """The first of each pair is the token."""
    pairs: list[Any] = [[token, token + 1] for token in TOKENS[:SIZE]]
    events = KvTranslator(SIZE, sentinels=MediaSentinels()).translate([stored([1], tokens=pairs)])
    assert set(held_by(events)) == {(0, 0, chain_plain(TOKENS[:SIZE], SIZE, 0)[0])}
