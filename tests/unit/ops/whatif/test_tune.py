"""`headwater tune`: it finds what is better, keeps to its guard, is not fooled by what does not last, and says so."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headwater.ops import cli
from headwater.ops.bench.trace import Trace
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.command import RunSetups, TuneFigures, as_text, check, figures_of, score, tune
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Search, Setup
from headwater.schemas.routing import Weights
from tests.support.data.whatif_traces import conversations, written
from tests.support.processes.line import arguments

TRACE = conversations(1, 50)
BEFORE = TuneFigures(200.0, 100.0, 1_000.0, 7.0, 2_000.0, 0.3)


def landscape(
    figures: Callable[[Weights], TuneFigures], later: Callable[[Weights], TuneFigures]
) -> RunSetups:
    """Runs whose outcome is a function of the weights, another one for later requests."""

    def runs(trace: Trace, setups: Sequence[Setup], after_ns: int) -> list[TuneFigures]:
        return [(later if after_ns else figures)(setup.weights) for setup in setups]

    return runs


def bowl(weights: Weights) -> TuneFigures:
    """Least at crowding 0.8 and queued 5."""
    off = abs(math.log((weights.crowding + 1e-3) / 0.8)) + abs(math.log((weights.queued + 1e-3) / 5))
    return BEFORE._replace(ttft_mean=150 + 20 * off)


def test_it_finds_the_bottom_and_says_what_to_paste() -> None:
    """Near enough, from the default weights, the same each time."""
    search = Search(names=("crowding", "queued"), trials=60)
    found = tune(TRACE, Setup(), search, landscape(bowl, bowl))
    assert found == tune(TRACE, Setup(), search, landscape(bowl, bowl))
    assert found.holds
    assert 0.5 < found.weights["crowding"] < 1.3
    assert 3.5 < found.weights["queued"] < 7.5
    assert found.gain == pytest.approx(1 - found.found["ttft_mean"] / found.before["ttft_mean"])
    assert found.trials <= 60
    assert (found.trained_on, found.judged_on) == (30, 20)
    crowding, queued = found.weights["crowding"], found.weights["queued"]
    assert f"--routing-weights crowding={crowding:g},queued={queued:g}" in as_text(found, search, Setup())


def test_what_does_not_last_is_not_recommended() -> None:
    """Better on the requests that were searched, worse on those after them."""
    search = Search(names=("crowding",), trials=20)
    worse = landscape(bowl, lambda weights: BEFORE._replace(ttft_mean=200 + weights.crowding))
    found = tune(TRACE, Setup(), search, worse)
    assert found.gain > 0 > found.later_gain
    assert not found.holds
    assert "does not hold later" in as_text(found, search, Setup())
    assert f"keep crowding={Weights().crowding:g}" in as_text(found, search, Setup())
    flat = tune(TRACE, Setup(), search, landscape(lambda _: BEFORE, lambda _: BEFORE))
    assert not flat.holds
    assert flat.weights == {"crowding": Weights().crowding}
    assert "nothing better was found" in as_text(flat, search, Setup())


def test_the_guard_outweighs_the_objective() -> None:
    """Two percent are free; a mean that halves is not worth a p99 that doubles. Reuse counts the other way round."""
    search = Search()
    assert score(BEFORE, BEFORE, search) == 1.0
    assert score(BEFORE, BEFORE._replace(ttft_mean=190, ttft_p99=1_019), search) == pytest.approx(0.95)
    assert score(BEFORE, BEFORE._replace(ttft_mean=100, ttft_p99=2_000), search) > 1
    assert score(BEFORE, BEFORE._replace(reuse=0.4), Search(objective="reuse")) == pytest.approx(0.75)


def test_figures_are_of_the_later_requests_only() -> None:
    """As the report has them for all."""
    ran = run(TRACE, Setup(workers=2))
    after_ns = TRACE.requests[30].arrival_ns
    later = [one for one in ran.served if one.request.arrival_ns >= after_ns]
    mean = sum(one.first_ns - one.request.arrival_ns for one in later) / len(later) / 1e6
    assert figures_of(ran, after_ns).ttft_mean == pytest.approx(mean)
    assert figures_of(ran, after_ns) != figures_of(ran)


def test_a_small_search_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON, in two processes the same as in one."""
    path = written(TRACE, tmp_path / "t.jsonl")
    words = [
        "headwater",
        "tune",
        str(path),
        "--workers",
        "2",
        "--trials",
        "4",
        "--search",
        "queued",
        "--json",
    ]
    found = []
    for jobs in ("1", "2"):
        monkeypatch.setattr(sys, "argv", [*words, "--jobs", jobs])
        assert cli.main() == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert set(found[0]["weights"]) == {"queued"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--search", "local_tokens"], "weights that can be searched are prefill"),
        (["--objective", "luck"], "--objective luck: choose from ttft_mean"),
        (["--trials", "0"], "--trials 0: expected `int` >= 1"),
        (["--share", "1"], "--share 1: expected `float` <= 0.9"),
    ],
)
def test_what_can_not_be_is_refused(words: list[str], reason: str) -> None:
    """Naming the option."""
    with pytest.raises(ConfigError, match=reason):
        check(arguments(["tune", "t", *words])["search"])
