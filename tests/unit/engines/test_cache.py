"""What an encode worker keeps is what routers are told of, block by block."""

import numpy as np

from headwater.engines.embeddings import EmbeddingCache
from headwater.engines.engine import EncodedImage, KvEvent
from headwater.schemas.encode_requests import embedding_hashes
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored
from headwater.schemas.hashing import unpack_hashes
from headwater.schemas.media import PromptMedia

BLOCK = 16


def image(name: str, tokens: int = 40, start: int = 0) -> PromptMedia:
    """An image whose embedding takes three blocks."""
    return PromptMedia("image", name * 32, start, tokens, (28, 28, 3), b"pixels")


def embedding(value: int) -> EncodedImage:
    """An embedding."""
    return EncodedImage(np.full((40, 4), value, np.float32), "float32")


def events(cache: EmbeddingCache) -> list[KvEvent]:
    """What is to be announced."""
    return cache.events.take()


def hashes(item: PromptMedia) -> list[int]:
    """The blocks that stand for an image."""
    found: list[int] = embedding_hashes(item, BLOCK).tolist()
    return found


def test_the_blocks_of_an_image_depend_on_it_alone() -> None:
    """Not on where it is in a prompt; a last partial block counts as a full one; no two images share any."""
    assert hashes(image("a")) == hashes(image("a", start=7))
    assert len(hashes(image("a"))) == 3
    assert len(hashes(image("a", tokens=48))) == 3
    assert len(hashes(image("a", tokens=49))) == 4
    assert not {*hashes(image("a"))} & {*hashes(image("b"))}
    assert len(hashes(image("a", tokens=20_000))) == 1_250


def test_the_least_recently_used_embedding_makes_room() -> None:
    """Routers learn of it before they learn of the new one."""
    cache = EmbeddingCache(BLOCK, 7)
    cache.keep(image("a"), embedding(1))
    cache.keep(image("b"), embedding(2))
    assert cache.find(image("a")) is not None
    assert cache.used_blocks == 6
    events(cache)
    cache.keep(image("c"), embedding(3))
    removed, stored = events(cache)
    assert isinstance(removed, BlocksRemoved)
    assert unpack_hashes(removed.hashes).tolist() == hashes(image("b"))
    assert isinstance(stored, BlocksStored)
    assert unpack_hashes(stored.hashes).tolist() == hashes(image("c"))
    assert cache.find(image("b")) is None
    found = cache.find(image("c"))
    assert found is not None
    assert found.values[0, 0] == 3
    assert (len(cache), cache.used_blocks) == (2, 6)


def test_an_image_with_another_number_of_tokens_is_another_one() -> None:
    """The number comes with the message, and an embedding of another length would end an engine."""
    cache = EmbeddingCache(BLOCK, 100)
    cache.keep(image("a"), embedding(1))
    assert cache.find(image("a", tokens=41)) is None


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    """And displaces nothing."""
    cache = EmbeddingCache(BLOCK, 3)
    cache.keep(image("a"), embedding(1))
    cache.keep(image("b", tokens=49), embedding(2))
    assert cache.find(image("a")) is not None
    assert len(events(cache)) == 1


def test_all_is_announced_anew_and_cleared() -> None:
    """As for a new incarnation: events that wait are part of it. Pixels are not kept."""
    cache = EmbeddingCache(BLOCK, 100)
    cache.keep(image("a"), embedding(1))
    cache.keep(image("b"), embedding(1))
    held = [unpack_hashes(one.hashes).tolist() for one in cache.held_blocks()]
    assert held == [hashes(image("a")), hashes(image("b"))]
    assert events(cache) == []
    assert not any(item.data for item, _ in cache._held.values())
    cache.clear()
    assert events(cache) == [BlocksCleared()]
    assert cache.used_blocks == 0
    assert cache.find(image("a")) is None
