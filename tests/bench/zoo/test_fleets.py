"""Fleets of the zoo whose workers are not all alike: what they are, their load, and what a peer replays of them."""

import json
from pathlib import Path

import pytest

from headwater.engines.sim import StepTime
from headwater.ops.config.setting import ConfigError
from headwater.schemas.routing import Weights
from tests.bench.zoo import command
from tests.bench.zoo.cells import PlannedCell, _replayed, plan_of
from tests.bench.zoo.compare import OURS, Cell
from tests.bench.zoo.figures import Figures
from tests.bench.zoo.fleets import ONE_SPEED, ZooFleet, plan_traffic
from tests.bench.zoo.load import demand_of, requests_per_s
from tests.bench.zoo.options import ZooOptions
from tests.bench.zoo.peer import PeerInstall, PeerRun
from tests.bench.zoo.peer_replay import fleet
from tests.bench.zoo.traffic import generate

pytestmark = pytest.mark.soak
"""They test tools of ours."""

DEMAND = demand_of(generate("documents", 100, 1), StepTime())
EACH = requests_per_s(DEMAND, 2_000, 0.8, StepTime())


def test_equal_workers_unless_the_class_says_otherwise() -> None:
    """At the rate of as many single ones."""
    found = plan_traffic("documents", 8, DEMAND, 2_000, 0.8, 100)
    assert found.fleet == ZooFleet(8)
    assert found.rate == pytest.approx(8 * EACH)
    assert not found.fleet.description
    assert not found.fleet.not_replayed


def test_one_worker_turns_slow_after_a_third_of_the_run() -> None:
    """The load is that of a fleet without a slow one: nobody knew."""
    found = plan_traffic("slow_worker", 8, DEMAND, 2_000, 0.8, 100)
    [slow] = found.fleet.slowdowns
    assert found.rate == pytest.approx(8 * EACH)
    assert slow.at_s == pytest.approx(100 / found.rate / 3, abs=0.001)
    assert found.fleet.description == f"w000 4 times slower from {slow.at_s:.1f} s"
    assert found.fleet.not_replayed == ONE_SPEED
    assert found.fleet.setup("kv", 2_000, Weights()).slowdowns == (slow,)


def test_workers_of_two_speeds_get_less_than_fast_ones() -> None:
    """Three workers: 1, 1/2 and 1."""
    found = plan_traffic("two_speeds", 3, DEMAND, 2_000, 0.8, 100)
    assert found.rate == pytest.approx(2.5 * EACH)
    assert found.fleet.setup("kv", 2_000, Weights()).worker_speeds == (1.0, 0.5)
    assert found.fleet.description == "speeds 1,0.5 in turn"
    assert found.fleet.not_replayed


def test_two_pools_share_the_fleet() -> None:
    """Another division would bear less; both kinds of work fit, and round robin hands all prompts over."""
    found = plan_traffic("prefill_decode", 8, DEMAND, 2_000, 0.8, 100)
    prefill, decode = found.fleet.prefill_workers, found.fleet.decode_workers
    assert (found.fleet.workers, prefill + decode) == (0, 8)
    assert min(prefill, decode) > 0
    # The time for prompts is at most the share of the pool's.
    assert found.rate * DEMAND.prefill_ms / 1000 <= 0.8 * prefill + 1e-9
    assert found.rate > 8 * EACH * 0.5
    assert not found.fleet.not_replayed
    assert found.fleet.setup("round_robin", 2_000, Weights()).weights.apart
    assert not found.fleet.setup("kv", 2_000, Weights()).weights.apart
    with pytest.raises(ConfigError, match="at least 2 workers"):
        plan_traffic("prefill_decode", 1, DEMAND, 2_000, 0.8, 100)


def test_a_peer_is_not_asked_for_what_it_cannot_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells keep their places; pools are passed on."""
    asked: list[PeerRun] = []
    figures = {"default": Figures(0.5, 1, 1, 1, 1, 1, 1)}

    def replay(_: PeerInstall, runs: list[PeerRun]) -> list[dict[str, Figures]]:
        asked.extend(runs)
        return [figures] * len(runs)

    monkeypatch.setattr("tests.bench.zoo.cells.replay", replay)
    planned = []
    for name in ("slow_worker", "prefill_decode"):
        traffic = plan_traffic(name, 8, DEMAND, 2_000, 0.8, 100)
        cell = Cell(name, "heavy", 8, 2_000, 100, traffic.rate, [])
        planned.append(PlannedCell(cell, Path(f"{name}.jsonl"), traffic.fleet))
    assert _replayed(PeerInstall("python", "9"), planned) == [{}, figures]
    assert [(one.file, one.workers) for one in asked] == [("prefill_decode.jsonl", 0)]
    assert asked[0].prefill_workers + asked[0].decode_workers == 8
    assert _replayed(PeerInstall("python", "9"), planned[:1]) == [{}]


def test_a_peers_engines() -> None:
    """Equal ones, or two pools with a link between them."""
    run = PeerRun("x", 8, 100)._asdict()
    task = {"kv_bytes_per_token": 7, "transfer_gb_per_s": 20.0}
    assert fleet(run, task, None, new=True) == {
        "num_workers": 8,
        "extra_engine_args": {"engine": {"num_gpu_blocks": 100, "block_size": 512, "emit_kv_events": True}},
    }
    pools = fleet(run | {"prefill_workers": 2, "decode_workers": 6}, task, None, new=True)
    assert (pools["num_prefill_workers"], pools["num_decode_workers"]) == (2, 6)
    assert pools["prefill_engine_args"]["engine"]["worker_type"] == "prefill"
    assert pools["decode_engine_args"]["engine"]["kv_transfer_bandwidth"] == 20.0
    assert "num_workers" not in pools


def test_the_three_classes_in_a_small_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    """Our rows under each fleet, and the reason where a peer did not run."""
    options = ZooOptions(
        classes="prefill_decode,slow_worker,two_speeds", loads="light", policies="kv", requests=12
    )
    found = command.compare_all(plan_of(options, (2,)), [])
    assert [[row.policy for row in cell.rows] for cell in found.cells] == [["kv", "round_robin"]] * 3
    assert [cell.fleet.split()[0] for cell in found.cells] == ["1", "w000", "speeds"]
    found.cells[1].not_run["Dynamo 9"] = ONE_SPEED
    command.show(found, as_json=False)
    text = capsys.readouterr().out
    assert f"Dynamo 9 did not run: {ONE_SPEED}" in text
    assert "blocks each; speeds 1,0.5 in turn" in text
    command.show(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["cells"][1]["rows"][0]["replay"] == OURS
