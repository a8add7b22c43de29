"""What SGLang's KV events have of their own: salts, names of adapters, signed hashes, images, pairs of tokens."""

from typing import Any

import msgspec

from headwater.engines.kv_events.translator import KvTranslator
from headwater.engines.kv_events.wire import decode
from headwater.schemas.hashing import chain_plain, seed
from tests.unit.engines.kv_events.test_events import SIZE, TOKENS, held_by, removed, stored

SENTINEL = 1_000_000 + (1 << 61)


def test_salts_and_adapters_are_fields_of_an_event() -> None:
    """Not among extra keys, as vLLM's."""
    translator = KvTranslator(SIZE, sentinels=True)
    events = translator.translate([stored([-5, -6], cache_salt="tenant", lora_name="l@1")])
    root = seed("l@1", "tenant")
    first, second = chain_plain(TOKENS[: 2 * SIZE], SIZE, root)
    assert set(held_by(events)) == {(0, root, first), (0, first, second)}
    assert not held_by(translator.translate([removed([-6, -5])]), held_by(events))


def test_arrays_of_older_releases_are_read() -> None:
    """The first fields of vLLM's, in the same order."""
    event = ["BlockStored", [-5], None, TOKENS[:SIZE], SIZE, None, "GPU"]
    batch = decode(msgspec.msgpack.encode([1.0, [event, ["BlockRemoved", [-5], "GPU"]], 0]))
    translator = KvTranslator(SIZE, sentinels=True)
    assert len(translator.translate(batch.events, batch.at_s)) == 2
    assert len(translator) == 0


def test_blocks_with_images_and_what_follows_them_have_no_name() -> None:
    """Numbers above every token id stand for parts of an image."""
    translator = KvTranslator(SIZE, sentinels=True)
    tokens = [*TOKENS[: SIZE + 1], SENTINEL, *TOKENS[SIZE + 2 : 3 * SIZE]]
    events = translator.translate([stored([1, 2, 3], tokens=tokens), stored([4], parent=3)])
    assert set(held_by(events)) == {(0, 0, chain_plain(TOKENS[:SIZE], SIZE, 0)[0])}
    assert (translator.unnamed, translator.orphans) == (2, 1)


def test_under_eagle_tokens_come_with_their_successors() -> None:
    """The first of each pair is the token."""
    pairs: list[Any] = [[token, token + 1] for token in TOKENS[:SIZE]]
    events = KvTranslator(SIZE, sentinels=True).translate([stored([1], tokens=pairs)])
    assert set(held_by(events)) == {(0, 0, chain_plain(TOKENS[:SIZE], SIZE, 0)[0])}
