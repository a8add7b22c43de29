"""Rooms of SGLang's hand-offs: none is used twice, none is entered for another prompt."""

from typing import Any

import msgspec
import pytest

from headwater.engines.engine import EngineUnavailable, Unusable, seal
from headwater.engines.sglang import config as sglang_config
from headwater.engines.sglang import engine
from headwater.engines.sglang.engine import NOWHERE, ROOMS, Room, Rooms, SglangHandoffs
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling


def request(*tokens: int) -> GenerateRequest:
    """A leg with this prompt."""
    return GenerateRequest("r-1", "e", 1, pack_tokens(list(tokens)), Sampling(4))


def test_no_room_is_opened_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by one engine, however unlucky its draw: with few rooms, each is opened once before one is again."""
    monkeypatch.setattr(engine, "ROOMS", 64)
    for _ in range(50):
        rooms = Rooms()
        opened = [rooms.open() for _ in range(63)]
        assert sorted(opened) == list(range(1, 64)), "0 is no room"


def test_rooms_of_two_engines_differ() -> None:
    """They are drawn from 63 bits, by each engine for itself."""
    first, second = Rooms(), Rooms()
    opened = [rooms.open() for rooms in (first, second) for _ in range(5_000)]
    assert len(set(opened)) == len(opened)
    assert all(0 < room < ROOMS for room in opened)
    assert max(opened) > ROOMS // 4


def test_both_legs_meet_in_one_room() -> None:
    """On the prefill engine's server."""
    fields, pinned = SglangHandoffs("prefill", "10.0.0.1", 8998).open(request(1, 2))
    assert (fields["bootstrap_host"], fields["bootstrap_port"]) == ("10.0.0.1", 8998)
    assert SglangHandoffs("decode").enter(request(1, 2), pinned.params) == fields


def test_a_room_is_entered_once_and_for_its_own_prompt() -> None:
    """A refused entry leaves it good."""
    _, pinned = SglangHandoffs("prefill", "h", 1).open(request(1, 2))
    decode = SglangHandoffs("decode")
    with pytest.raises(Unusable, match="another prompt's"):
        decode.enter(request(1, 3), pinned.params)
    decode.enter(request(1, 2), pinned.params)
    for _ in range(2):
        with pytest.raises(Unusable, match="already"):
            decode.enter(request(1, 2), pinned.params)


@pytest.mark.parametrize(
    "room",
    [
        Room("", 1, 1),
        Room("h", 0, 1),
        Room("h", 1, 0),
        Room("h", 1, ROOMS),
        Room("h", 1, -1),
        Room(NOWHERE, 1, 1),
    ],
)
def test_what_names_no_room_is_unusable(room: Room) -> None:
    """SGLang answers for a room of its fake host at once, from blocks that nobody wrote."""
    with pytest.raises(Unusable, match="no room"):
        SglangHandoffs("decode").enter(request(1), seal(msgspec.msgpack.encode(room), request(1)))
    for damaged in (b"", seal(b"", request(1)), seal(b"\x93\x01", request(1))):
        with pytest.raises(Unusable):
            SglangHandoffs("decode").enter(request(1), damaged)


def test_a_rehearsal_meets_nobody() -> None:
    """It has a room of its own all the same."""
    handoffs = SglangHandoffs("decode")
    first, second = handoffs.rehearse(), handoffs.rehearse()
    assert first["bootstrap_host"] == NOWHERE
    assert first["bootstrap_room"] != second["bootstrap_room"]


def test_a_role_decides_the_mode() -> None:
    """Native arguments may repeat it, and may not contradict it."""
    assert [sglang_config.mode_of(role, {}) for role in ("both", "prefill", "decode")] == [
        None,
        "prefill",
        "decode",
    ]
    assert sglang_config.mode_of("decode", {"disaggregation_mode": "decode"}) == "decode"
    contradictions: list[tuple[Any, dict[str, Any]]] = [
        ("both", {"disaggregation_mode": "prefill"}),
        ("prefill", {"disaggregation_mode": "decode"}),
        ("prefill", {"dp_size": 2}),
    ]
    for role, native in contradictions:
        with pytest.raises(EngineUnavailable, match=f"--role {role}"):
            sglang_config.mode_of(role, native)


def test_only_engines_of_equal_models_and_layouts_pair() -> None:
    """And none without a mode."""
    config = {"page_size": 16, "model_path": "m", "dtype": "bfloat16", "kv_cache_dtype": "auto"}
    same = engine.pairs_with("prefill", "0.5.23", "m", config)
    assert same == engine.pairs_with("decode", "0.5.23", "m", config) != ""
    others = [
        engine.pairs_with("decode", "0.5.22", "m", config),
        engine.pairs_with("decode", "0.5.23", "m", config | {"page_size": 32}),
        engine.pairs_with("decode", "0.5.23", "m", config | {"kv_cache_dtype": "fp8_e4m3"}),
    ]
    assert len({same, *others}) == 4
    assert engine.pairs_with(None, "0.5.23", "m", config) == ""
