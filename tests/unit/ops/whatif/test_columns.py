"""`headwater whatif` on the command line: options make columns, errors name options, output is a table or JSON."""

import json
import sys
from pathlib import Path

import pytest

from headwater.engines.sim import StepTime
from headwater.ops import cli
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.command import columns
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.workers import shapes
from headwater.router.queue import BusyLimits
from headwater.schemas.routing import Weights
from tests.support.data.whatif_traces import conversations, written
from tests.support.processes.line import arguments


def setups(*words: str) -> list[Setup]:
    """The columns of a command line."""
    return columns(arguments(["whatif", "t", *words])["values"])


def test_without_options_there_is_one_column_of_defaults() -> None:
    """As the issue names them."""
    assert setups() == [Setup()]
    assert (Setup().workers, Setup().blocks, Setup().block_size, Setup().speed) == (8, 4_000, 512, 1.0)


def test_lists_go_together_and_single_values_hold_for_all() -> None:
    """Two policies, two speeds, one worker count: two columns."""
    found = setups(
        "--policy", "kv", "--policy", "round_robin", "--speed", "1", "--speed", "4", "--workers", "2"
    )
    assert [(s.policy, s.speed, s.workers) for s in found] == [("kv", 1.0, 2), ("round_robin", 4.0, 2)]


def test_weights_and_step_times_are_read(tmp_path: Path) -> None:
    """By name, as numbers or from a file."""
    file = tmp_path / "steps.json"
    file.write_text('{"prefill_ms": [1, 2, 3], "decode_ms": [4, 5, 6]}')
    found = setups(
        "--routing-weights", "crowding=0.5,apart=true", "--step-time", "1,2,3,4,5,6", "--step-time", str(file)
    )
    assert [setup.weights for setup in found] == [Weights(crowding=0.5, apart=True)] * 2
    assert [setup.step_time for setup in found] == [StepTime((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))] * 2


def test_only_kv_has_the_routers_queue_unless_it_is_asked_for() -> None:
    """A baseline is a router without one: the peer's round robin has none."""
    found = setups("--policy", "kv", "--policy", "round_robin")
    assert [setup.busy_prefill_tokens for setup in found] == [BusyLimits().prefill_tokens, 0]
    [asked] = setups("--policy", "round_robin", "--busy-prefill-tokens", "5")
    assert asked.busy_prefill_tokens == 5


def test_prefill_and_decode_workers_replace_the_default_ones() -> None:
    """Unless workers that do both are asked for beside them."""
    [apart] = setups("--prefill-workers", "2", "--decode-workers", "3")
    assert (apart.workers, apart.prefill_workers, apart.decode_workers) == (0, 2, 3)
    [mixed] = setups("--prefill-workers", "2", "--workers", "3")
    assert [shape.name for shape in shapes(mixed)] == ["w000", "w001", "w002", "p000", "p001"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--policy", "kv", "--policy", "random", "--speed", "1", "--speed", "2", "--speed", "3"],
            "give each once or 3 times",
        ),
        (["--policy", "best"], "--policy best: choose from kv"),
        (
            ["--routing-weights", "crowding"],
            "--routing-weights crowding: crowding: give NAME=VALUE; names are prefill",
        ),
        (["--routing-weights", "crowding=much"], "--routing-weights crowding=much"),
        (["--step-time", "1,2"], "--step-time 1,2: neither default nor zero, nor six or nine numbers"),
        (["--workers", "0"], "at least one worker is needed"),
        (["--prefill-workers", "2"], "no worker would decode"),
        (["--blocks", "0"], "--blocks 0: expected `int` >= 1"),
        (["--speed=-1"], "--speed -1: expected `float` > 0"),
    ],
)
def test_what_can_not_be_is_refused(words: list[str], reason: str) -> None:
    """Naming the option."""
    with pytest.raises(ConfigError, match=reason):
        setups(*words)


def test_a_small_trace_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table side by side, and as JSON."""
    path = written(conversations(2, 60), tmp_path / "t.jsonl")
    words = ["headwater", "whatif", str(path), "--workers", "2", "--policy", "kv", "--policy", "round_robin"]
    monkeypatch.setattr(sys, "argv", words)
    assert cli.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("policy")] == [["policy", "kv", "round_robin"]]
    assert any(line.startswith("TTFT p99 ms") for line in lines)
    monkeypatch.setattr(sys, "argv", [*words, "--json", "--jobs", "2"])
    assert cli.main() == 0
    kv, robin = json.loads(capsys.readouterr().out)
    assert (kv["setup"]["policy"], robin["setup"]["policy"]) == ("kv", "round_robin")
    assert kv["requests"] == robin["requests"] == 60
    assert kv["reuse"] > robin["reuse"]
