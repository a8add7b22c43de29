"""What a translator of vLLM's events does about clears, holes, host memory and groups."""

from typing import Any

import pytest

from headwater.engines.engine import KvEvent
from headwater.engines.kv_events import KvTranslator
from headwater.schemas.events import CPU, DISK, GPU, BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.hashing import chain_plain, unpack_hashes
from tests.unit.engines.test_events import NAMES, SIZE, TOKENS, removed, stored

CLEAR: dict[str, Any] = {"type": "AllBlocksCleared"}


def names(events: list[KvEvent]) -> list[int]:
    """All blocks of these events, in order."""
    found: list[int] = []
    for event in events:
        assert isinstance(event, BlocksStored | BlocksRemoved)
        found += unpack_hashes(event.hashes).tolist()
    return found


def asked(translator: KvTranslator, at_s: float = 100.0) -> list[KvEvent]:
    """We had vLLM clear its cache."""
    translator.expect_clear()
    return translator.confirm_clear(at_s)


def test_a_clear_that_was_asked_for_counts_before_vllm_tells_of_it() -> None:
    """What still comes from before it raises nothing from the dead, and the late word of it changes nothing."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1, 2])])
    assert asked(translator) == [BlocksCleared()]
    assert translator.held() == []
    assert translator.translate([stored([3], 2, TOKENS[8:]), removed([1])], at_s=99.0) == []
    assert translator.translate([removed([2]), CLEAR, stored([7])], at_s=101.0) == [
        BlocksStored(0, NAMES[0].to_bytes(8, "little"))
    ]
    assert names(list(translator.held())) == NAMES[:1]


def test_each_clear_is_waited_for() -> None:
    """The word of the first one does not let through what came between the two."""
    translator = KvTranslator(SIZE)
    for _ in range(2):
        asked(translator)
    assert translator.translate([CLEAR, stored([1])], at_s=99.0) == []
    assert names(translator.translate([CLEAR, stored([1])], at_s=101.0)) == NAMES[:1]


def test_a_clear_that_was_told_before_the_call_returned_is_not_waited_for() -> None:
    """The events can be faster than the answer; what came behind them is new."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1, 2])])
    translator.expect_clear()
    assert translator.translate([CLEAR])[0] == BlocksCleared()
    assert names(translator.translate([stored([5])])) == NAMES[:1]
    assert translator.confirm_clear(100.0) == []
    assert names(translator.translate([stored([6], 5, TOKENS[4:8])], at_s=101.0)) == NAMES[1:2]


def test_a_clear_that_did_not_happen_is_not_waited_for_for_ever() -> None:
    """One rank of several may have refused: its next batch has no word of it, and it goes on as after a hole."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1])])
    asked(translator, at_s=100.0)
    assert names(translator.translate([stored([8])], at_s=101.0)) == NAMES[:1]
    assert translator.cold
    assert translator.translate([stored([2], 1, TOKENS[4:8])], at_s=102.0) == []
    assert translator.orphans == 1


def test_after_a_hole_only_what_is_announced_anew_is_held() -> None:
    """Blocks come back by a hit that vLLM reports in full, once each; their children then are known too."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1, 2]), stored([1])])
    assert translator.lost(4) == [KvGap(4), BlocksCleared()]
    assert translator.cold
    assert translator.translate([stored([3], 2, TOKENS[8:])]) == []
    assert names(translator.translate([stored([1])])) == NAMES[:1]
    assert names(translator.translate([stored([1, 2])])) == NAMES[1:2], "a repetition is no copy"
    assert names(translator.translate([stored([3], 2, TOKENS[8:])])) == NAMES[2:]
    assert names(list(translator.held())) == NAMES
    assert len(translator.translate([removed([1])])) == 1
    assert translator.translate([removed([1])]) == []
    translator.translate([CLEAR])
    assert not translator.cold


def test_a_hole_may_have_had_the_clear_in_it() -> None:
    """It is not waited for any more."""
    translator = KvTranslator(SIZE)
    asked(translator)
    translator.lost(1)
    assert names(translator.translate([stored([1])])) == NAMES[:1]


def placeholder(hashes: list[Any], medium: str) -> dict[str, Any]:
    """As vLLM's offloading tells: by hash alone."""
    return stored(hashes, tokens=[], block_size=0, medium=medium)


@pytest.mark.parametrize(("medium", "tier"), [("CPU", CPU), ("STORAGE", DISK)])
def test_offloaded_blocks_are_named_by_their_hash(medium: str, tier: int) -> None:
    """While they are on the GPU, and after they left it; what never was there is counted and left out."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1, 2, 3])])
    [event] = translator.translate([placeholder([2], medium)])
    assert event == BlocksStored(NAMES[0], NAMES[1].to_bytes(8, "little"), tier)
    translator.translate([removed([1]), removed([2])])
    assert translator.translate([placeholder([1, 9], medium)]) == [
        BlocksStored(0, NAMES[0].to_bytes(8, "little"), tier)
    ]
    assert translator.unnamed == 1
    assert [(run.tier, names([run])) for run in translator.held()] == [(tier, NAMES[:2]), (GPU, NAMES[2:])]
    assert len(translator.translate([removed([1], medium=medium)])) == 1


def test_a_block_keeps_its_name_where_an_event_tells_less() -> None:
    """Offloading leaves the salt out: by tokens alone the block would be everybody's."""
    translator = KvTranslator(SIZE)
    [first] = translator.translate([stored([1], extra_keys=[["tenant"]])])
    translator.translate([removed([1])])
    [second] = translator.translate([stored([1], medium="CPU")])
    assert isinstance(first, BlocksStored)
    assert second == BlocksStored(first.parent, first.hashes, CPU)
    assert chain_plain(TOKENS[:SIZE], SIZE, 0) != names([first])


def test_one_group_of_full_attention_stands_for_all() -> None:
    """Each group stores each block under the same hash: counted once."""
    translator = KvTranslator(SIZE)
    both = [stored([1], kv_cache_spec_kind="full_attention", group_idx=group) for group in (2, 5)]
    assert len(translator.translate(both)) == 1
    assert translator.translate([removed([1], group_idx=5)]) == []
    assert len(translator.translate([removed([1], group_idx=2)])) == 1
    assert len(translator) == 0
