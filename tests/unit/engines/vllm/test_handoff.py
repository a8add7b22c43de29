"""Parameters of vLLM's hand-offs: which are whole, which were used, which engines pair."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headwater.engines.engine import Unusable
from headwater.engines.vllm.handoff import VllmHandoffs, can_hand_over, pairs_with

WHOLE: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e",
    "remote_request_id": "r-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_prefill_cached_tokens": 64,
    "of_a_later_release": [1],
}


def config(connector: str | None = "NixlConnector", model: str = "m", **extra: Any) -> Any:
    """The parts of a VllmConfig that are looked at."""
    transfer = connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(model=model, dtype="torch.bfloat16"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def packed(**changes: Any) -> bytes:
    """The whole map with changes."""
    return msgspec.json.encode({**WHOLE, **changes})


def test_parameters_go_through_as_they_are_but_for_the_count_of_the_other_side() -> None:
    """Also what a later release adds."""
    handoffs = VllmHandoffs(config())
    pinned = handoffs.pinned(WHOLE)
    assert pinned is not None
    expected = {key: value for key, value in WHOLE.items() if key != "remote_prefill_cached_tokens"}
    assert handoffs.fetch(pinned.params) == expected


def test_one_list_of_blocks_is_taken_too() -> None:
    """As releases before cache groups give it."""
    assert VllmHandoffs(config()).fetch(packed(remote_block_ids=[0, 1]))["remote_block_ids"] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_prefill": False},
        {"remote_block_ids": []},
        {"remote_block_ids": [[], []]},
        {"remote_block_ids": None},
        {"remote_engine_id": ""},
        {"remote_request_id": None},
        {"remote_host": None},
        {"remote_port": "5600"},
        {"tp_size": None},
    ],
)
def test_what_is_not_whole_is_neither_made_nor_taken(change: dict[str, Any]) -> None:
    """VLLM would wait for ever, or its engine end."""
    handoffs = VllmHandoffs(config())
    assert handoffs.pinned({**WHOLE, **change}) is None
    with pytest.raises(Unusable):
        handoffs.fetch(packed(**change))


@pytest.mark.parametrize("params", [b"", b"\xff", b"[]", b"{}", packed()[:-9]])
def test_what_is_no_map_is_unusable(params: bytes) -> None:
    """And nothing returned is nothing to hand over."""
    with pytest.raises(Unusable):
        VllmHandoffs(config()).fetch(params)
    assert VllmHandoffs(config()).pinned(None) is None


def test_parameters_are_good_once() -> None:
    """Whatever else is in them; other requests and engines are others."""
    handoffs = VllmHandoffs(config())
    handoffs.fetch(packed())
    for _ in range(2):
        with pytest.raises(Unusable, match="already"):
            handoffs.fetch(packed(remote_host="10.0.0.1"))
    handoffs.fetch(packed(remote_request_id="r-2"))
    handoffs.fetch(packed(remote_engine_id="f"))


@pytest.mark.parametrize(("extra", "lease"), [({}, 20.0), ({"kv_lease_duration": 60}, 40.0)])
def test_the_lease_ends_before_the_engines(extra: dict[str, Any], lease: float) -> None:
    """A third is for the way."""
    pinned = VllmHandoffs(config(**extra)).pinned(WHOLE)
    assert pinned is not None
    assert pinned.lease_s == pytest.approx(lease)


def test_only_connectors_that_hand_over_pair(tmp_path: Path) -> None:
    """Alone or among several; equal names for equal models only."""
    inner = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]
    assert can_hand_over(config())
    assert can_hand_over(config("MultiConnector", connectors=inner))
    for other in (
        config(None),
        config("OffloadingConnector"),
        config("MultiConnector", connectors=inner[:1]),
    ):
        assert not can_hand_over(other)
        assert pairs_with(other, "m", "1") == ""
    lease = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 90}}
    pinned = VllmHandoffs(config("MultiConnector", connectors=[lease])).pinned(WHOLE)
    assert pinned is not None
    assert pinned.lease_s == pytest.approx(60.0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    names = [pairs_with(config(model=str(tmp_path / name)), "m", "0.32") for name in ("a", "a", "b")]
    assert names[0] == names[1] != names[2]
    (tmp_path / "a" / "model.safetensors").write_bytes(b"weights")
    assert pairs_with(config(model=str(tmp_path / "a")), "m", "0.32") != names[0]
    assert names[0].startswith("vllm/0.32/m-")
    assert names[0].endswith("/bfloat16/auto")
