"""vLLM's KV events into ours: both encodings, names that an edge computes alike, copies, orphans, dumps."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.engines.engine import KvEvent
from headwater.engines.kv_events import KvTranslator, decode
from headwater.schemas.events import CPU, DISK, GPU, BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.hashing import chain_plain, seed, sequence_hashes, unpack_hashes

SIZE = 4
TOKENS = list(range(100, 112))
NAMES = chain_plain(TOKENS, SIZE, 0)


def stored(
    hashes: list[Any], parent: Any = None, tokens: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    """A BlockStored event as a map."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": TOKENS[: SIZE * len(hashes)] if tokens is None else tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: list[Any], **more: Any) -> dict[str, Any]:
    """A BlockRemoved event as a map."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


def held_by(events: list[KvEvent], held: Counter[tuple[int, int, int]] | None = None) -> Counter[Any]:
    """(tier, parent, block) with the number of copies, as a router would count them."""
    held = Counter() if held is None else held
    for event in events:
        match event:
            case BlocksStored():
                parent = event.parent
                for block in unpack_hashes(event.hashes).tolist():
                    held[event.tier, parent, block] += 1
                    parent = block
            case BlocksRemoved():
                for block in unpack_hashes(event.hashes).tolist():
                    [key] = [one for one in +held if (one[0], one[2]) == (event.tier, block)]
                    held[key] -= 1
            case BlocksCleared():
                held.clear()
    return +held


@pytest.mark.parametrize("rank", [[], [0], [None]])
@pytest.mark.parametrize("shape", ["map", "array"])
def test_both_encodings_are_read(shape: str, rank: list[Any]) -> None:
    """Maps with a type, and positional arrays with the tag first, as older releases publish them."""
    events: list[Any] = [stored([1, b"\x02" * 32], lora_name="l"), removed([1]), {"type": "AllBlocksCleared"}]
    if shape == "array":
        full = [*events[0].values()]
        events = [full, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]
    batch = decode(msgspec.msgpack.encode([1.5, events, *rank]))
    first, second, third = batch.events
    assert batch.at_s == 1.5
    assert first == stored([1, b"\x02" * 32], lora_name="l")
    assert second == removed([1])
    assert third == {"type": "AllBlocksCleared"}


def test_fields_in_an_array_are_taken_by_their_place() -> None:
    """Also the later ones, and without the trailing ones that are not set."""
    full = ["BlockStored", [1], None, [1], 4, None, "CPU", "lora", [["salt"]], 2, "mla_attention", "more"]
    [event] = decode(msgspec.msgpack.encode([0.0, [full]])).events
    assert (event["medium"], event["extra_keys"], event["group_idx"]) == ("CPU", [["salt"]], 2)
    assert event["kv_cache_spec_kind"] == "mla_attention"
    [short] = decode(msgspec.msgpack.encode([0.0, [full[:6]]])).events
    assert "medium" not in short


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x01", b"\x91\x01", b"\x92\x01\x02", b"\x92\x01\x91\x05"]
)
def test_what_is_no_batch_of_events_is_refused(payload: bytes) -> None:
    """The socket turns these errors into a gap; nothing else may come."""
    with pytest.raises((msgspec.DecodeError, ValueError)):
        decode(payload)


def test_blocks_are_named_as_an_edge_names_them() -> None:
    """From tokens alone, chained over events, whatever vLLM calls them."""
    translator = KvTranslator(SIZE)
    first = translator.translate([stored([b"a", b"b"])])
    second = translator.translate([stored([77], b"b", TOKENS[8:])])
    assert held_by(second, held_by(first)) == {
        (GPU, 0, NAMES[0]): 1,
        (GPU, NAMES[0], NAMES[1]): 1,
        (GPU, NAMES[1], NAMES[2]): 1,
    }
    prompt = sequence_hashes(np.array(TOKENS, np.uint32), SIZE)
    assert prompt.tolist() == NAMES
    assert len(translator) == 3


@pytest.mark.parametrize(
    ("lora", "keys", "root"),
    [
        (None, None, 0),
        (None, [["tenant"], None], seed("", "tenant")),
        ("adapter", [["adapter"], ["adapter"]], seed("adapter")),
        ("adapter", [["adapter", "tenant"], ["adapter"]], seed("adapter", "tenant")),
        ("same", [["same", "same"], ["same"]], seed("same", "same")),
    ],
)
def test_adapters_and_salts_root_the_chain(lora: str | None, keys: Any, root: int) -> None:
    """A block of a tenant or an adapter has the name that an edge computes with its seed."""
    event = stored([1, 2], lora_name=lora, extra_keys=keys)
    [ours] = KvTranslator(SIZE).translate([event])
    assert isinstance(ours, BlocksStored)
    assert ours.parent == root
    assert unpack_hashes(ours.hashes).tolist() == chain_plain(TOKENS[:8], SIZE, root)


def test_multimodal_items_are_part_of_a_name() -> None:
    """Two images behind equal placeholder tokens give two names, from the block they lie in."""

    def names(item: str | None) -> list[int]:
        keys = [None, [[item, 0]] if item else None, None]
        [ours] = KvTranslator(SIZE).translate([stored([1, 2, 3], extra_keys=keys)])
        assert isinstance(ours, BlocksStored)
        found: list[int] = unpack_hashes(ours.hashes).tolist()
        return found

    plain, cat, dog = names(None), names("cat"), names("dog")
    assert plain == NAMES
    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1], plain[2], cat[2], dog[2]}) == 6


def test_copies_are_counted_per_tier() -> None:
    """A block stored twice is announced twice and gone after two removals; tiers do not mix."""
    translator = KvTranslator(SIZE)
    events = [stored([1]), stored([1]), stored([1], medium="CPU_PINNED"), stored([1], medium="STORAGE")]
    told = held_by(translator.translate(events))
    assert told == {(GPU, 0, NAMES[0]): 2, (CPU, 0, NAMES[0]): 1, (DISK, 0, NAMES[0]): 1}
    assert len(translator.translate([removed([1]), removed([1]), removed([1])])) == 2
    assert translator.translate([removed([1], medium="CPU")])[0].tier == CPU  # type: ignore[union-attr]
    assert len(translator) == 1, "the copy on disk is left"
    assert len(translator.translate([removed([1], medium="DISK")])) == 1
    assert len(translator) == 0


def test_removals_of_unknown_blocks_are_not_passed_on() -> None:
    """Nor is an event made of nothing else."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1])])
    [ours] = translator.translate([removed([9, 1, 9])])
    assert isinstance(ours, BlocksRemoved)
    assert unpack_hashes(ours.hashes).tolist() == [NAMES[0]]
    assert translator.translate([removed([1, 9])]) == []


def test_a_block_behind_an_unknown_one_is_counted_as_an_orphan() -> None:
    """Its name cannot be known: nothing is claimed for it, nor for its children."""
    translator = KvTranslator(SIZE)
    assert translator.translate([stored([2, 3], 1), stored([4], 3)]) == []
    assert (translator.orphans, len(translator)) == (3, 0)


@pytest.mark.parametrize(
    "event",
    [
        stored([1], block_size=8),
        stored([1], kv_cache_spec_kind="sliding_window", group_idx=1),
        stored([1], kv_cache_spec_kind="mamba"),
        stored([1, 2], tokens=[1, 2, 3, 4]),
        {"type": "Heartbeat"},
        {"no": "type"},
    ],
)
def test_what_cannot_be_indexed_is_left_out(event: dict[str, Any]) -> None:
    """Other block sizes, groups that are no prefix chains, missing tokens, events of a later release."""
    translator = KvTranslator(SIZE)
    assert translator.translate([event]) == []
    assert len(translator) == 0


def test_removals_of_other_groups_do_not_touch_indexed_blocks() -> None:
    """Groups share block hashes: only those of the full-attention group count."""
    translator = KvTranslator(SIZE)
    translator.translate(
        [
            stored([1], kv_cache_spec_kind="full_attention", group_idx=0),
            stored([1], kv_cache_spec_kind="sliding_window", group_idx=1),
        ]
    )
    assert translator.translate([removed([1], group_idx=1)]) == []
    assert len(translator.translate([removed([1], group_idx=0)])) == 1


def test_a_clear_and_a_loss_forget_everything() -> None:
    """After both nothing is known; a loss says how much was missed."""
    translator = KvTranslator(SIZE)
    translator.translate([stored([1, 2])])
    assert translator.translate([{"type": "AllBlocksCleared"}]) == [BlocksCleared()]
    assert (len(translator), translator.held()) == (0, [])
    translator.translate([stored([1, 2])])
    assert translator.lost(3) == [KvGap(3), BlocksCleared()]
    assert (len(translator), translator.held()) == (0, [])


PATHS = [(family, depth) for family in range(3) for depth in range(4)]


@given(
    st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(["GPU", "CPU"]), st.booleans()), max_size=40)
)
def test_a_dump_rebuilds_what_the_events_told(steps: list[tuple[tuple[int, int], str, bool]]) -> None:
    """`held()` behind a clear gives a router the same blocks, copies, tiers and parents, parents first."""
    translator, told = KvTranslator(SIZE), Counter[tuple[int, int, int]]()
    for (family, depth), medium, store in steps:
        tokens = [family] * SIZE
        if store:
            parent = (family, depth - 1) if depth else None
            event = stored([repr((family, depth))], parent and repr(parent), tokens, medium=medium)
        else:
            event = removed([repr((family, depth))], medium=medium)
        told = held_by(translator.translate([event]), told)
    dump = translator.held()
    assert held_by(list(dump)) == told
    seen = set()
    holders = {block for _, _, block in told}
    for run in dump:
        assert run.parent == 0 or run.parent in seen or run.parent not in holders
        seen.update(unpack_hashes(run.hashes).tolist())
