"""TensorRT-LLM's KV events as ours: gaps, windows, partial blocks, tiers."""

from typing import Any

import numpy as np

from headwater.engines.tensorrt_llm.polling import EventTranslator
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored, KvGap

SIZE = 4
A, B, C = list(range(4)), list(range(4, 8)), list(range(8, 12))


def block(number: int, tokens: list[int], level: int = 0) -> dict[str, Any]:
    return {"block_hash": number, "tokens": [{"token_id": one} for one in tokens], "cache_level": level}


def stored(
    at: int, parent: int | None, *blocks: dict[str, Any], window: int = 100, **more: Any
) -> dict[str, Any]:
    data = {"type": "stored", "parent_hash": parent, "blocks": list(blocks), **more}
    return {"event_id": at, "window_size": window, "data": data}


def removed(at: int, *hashes: int) -> dict[str, Any]:
    return {"event_id": at, "window_size": 100, "data": {"type": "removed", "block_hashes": list(hashes)}}


def ours(*blocks: list[int], salt: str = "", lora: str = "") -> list[int]:
    tokens = np.array([one for block in blocks for one in block], np.uint32)
    found: list[int] = hashing.sequence_hashes(tokens, SIZE, parent=hashing.seed(lora, salt)).tolist()
    return found


def hashes(event: Any) -> list[int]:
    found: list[int] = hashing.unpack_hashes(event.hashes).tolist()
    return found


def translator() -> EventTranslator:
    made = EventTranslator(SIZE)
    for number, window in enumerate((100, 10)):
        event = {"event_id": number, "window_size": window, "data": {"type": "created"}}
        assert made.translate(event) == []
    return made


def test_blocks_get_the_edges_hashes_in_a_chain() -> None:
    made = translator()
    [one] = made.translate(stored(2, None, block(2**64 - 1, A), block(12, B)))
    assert isinstance(one, BlocksStored)
    assert (one.parent, hashes(one)) == (hashing.ROOT, ours(A, B))
    [two] = made.translate(stored(3, 12, block(13, C)))
    assert (two.parent, hashes(two)) == (ours(A, B)[-1], ours(A, B, C)[-1:])  # type: ignore[union-attr]
    assert [hashes(event)[0] for event in made.held()] == ours(A, B, C)


def test_salt_and_adapter_are_part_of_the_chain() -> None:
    [one] = translator().translate(stored(2, None, block(11, A), cache_salt="tenant", lora_name="north"))
    assert hashes(one) == ours(A, salt="tenant", lora="north")


def test_partial_block_is_not_announced_nor_its_removal() -> None:
    made = translator()
    [one] = made.translate(stored(2, None, block(11, A), block(12, B[:3])))
    assert hashes(one) == ours(A)
    assert made.translate(removed(3, 12)) == []
    [gone] = made.translate(removed(4, 11, 99))
    assert isinstance(gone, BlocksRemoved)
    assert hashes(gone) == ours(A)
    assert made.held() == []


def test_sliding_windows_are_dropped_but_counted() -> None:
    made = translator()
    assert made.translate(stored(2, None, block(11, A), window=10)) == []
    assert made.translate(stored(3, None, block(11, A))) != []


def test_missing_number_is_a_gap_and_what_was_known_is_gone() -> None:
    """A block that follows an unknown one cannot be named; a new prompt can."""
    made = translator()
    made.translate(stored(2, None, block(11, A)))
    gap, cleared = made.translate(stored(6, 11, block(12, B)))
    assert gap == KvGap(3)
    assert cleared == BlocksCleared()
    assert made.held() == []
    [again] = made.translate(stored(7, None, block(11, A), block(12, B)))
    assert hashes(again) == ours(A, B)


def test_block_stored_twice_is_one_block() -> None:
    made = translator()
    made.translate(stored(2, None, block(11, A)))
    [one] = made.translate(stored(3, None, block(11, A), block(12, B)))
    assert (one.parent, hashes(one)) == (ours(A)[0], ours(A, B)[1:])  # type: ignore[union-attr]


def test_level_of_a_block_is_its_tier() -> None:
    made = translator()
    made.translate(stored(2, None, block(11, A)))
    level = {"new_value": 1, "old_value": 0}
    update = {"type": "updated", "block_hash": 11, "cache_level": level}
    down, up = made.translate({"event_id": 3, "window_size": 100, "data": update})
    assert (type(down), down.tier, type(up), up.tier) == (BlocksStored, 1, BlocksRemoved, 0)  # type: ignore[union-attr]
    [gone] = made.translate(removed(4, 11))
    assert gone.tier == 1  # type: ignore[union-attr]
