"""The zoo's table: ratios to the best of all others, what is behind, goodput, and a peer's output."""

import json
import sys
from pathlib import Path

import pytest

from headwater.ops.bench.trace import Trace, TraceRequest
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.report import report_of
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from tests.bench.zoo import command
from tests.bench.zoo.cells import plan_of
from tests.bench.zoo.compare import OURS, Cell, Row, behind, compared
from tests.bench.zoo.figures import Figures
from tests.bench.zoo.options import ZooOptions
from tests.bench.zoo.peer import PeerInstall, PeerRun, find_peer, parse, replay

pytestmark = pytest.mark.soak
"""They test tools of ours."""

SUMMARY = {
    "num_requests": 4,
    "completed_requests": 4,
    "prefix_cache_reused_ratio": 0.5,
    "mean_ttft_ms": 10.0,
    "median_ttft_ms": 9.0,
    "p99_ttft_ms": 30.0,
    "mean_itl_ms": 6.0,
    "mean_e2e_latency_ms": 100.0,
    "p99_e2e_latency_ms": 300.0,
}


def figures(reuse: float, ms: float, goodput: float | None = None) -> Figures:
    """All times alike."""
    return Figures(reuse, ms, ms, ms, ms, ms, ms, goodput)


def cell(*rows: Row) -> Cell:
    """One cell with these replays."""
    return Cell("hot", "heavy", 8, 2_000, 100, 5.0, list(rows))


def test_times_are_relative_to_round_robin_of_the_same_replay() -> None:
    """The peer has half of its round robin's time, so 100 of our 200 ms; shares are compared as they are."""
    found = compared(
        cell(
            Row(OURS, "kv", figures(0.6, 103, 0.9)),
            Row(OURS, "round_robin", figures(0.2, 200, 0.5)),
            Row("Dynamo 1", "round_robin", figures(0.3, 204)),
            Row("Dynamo 1", "default", figures(0.8, 102)),
        ),
        "kv",
    )
    assert found.best["ttft_mean"].ratio == pytest.approx(1.03)
    assert (found.best["ttft_mean"].label, found.best["ttft_mean"].rough) == ("Dynamo 1 default", False)
    assert found.best["reuse"].ratio == pytest.approx(0.75)
    assert (found.best["goodput"].label, found.best["goodput"].ratio) == ("round_robin", 1.8)
    # The p50 has no limit, and a peer's round robin is no competitor: ours is the same.
    assert [one.split(": ")[1].split()[0] for one in behind([found])] == [
        "ttft_mean",
        "ttft_p99",
        "itl",
        "e2e_mean",
        "e2e_p99",
    ]


def test_limits_are_one_percent_for_means_and_two_for_p99() -> None:
    """Against another policy of ours."""
    rows = Row(OURS, "kv", figures(0.6, 101.5)), Row(OURS, "round_robin", figures(0.6, 100))
    assert [one.split(": ")[1].split()[0] for one in behind([compared(cell(*rows), "kv")])] == [
        "ttft_mean",
        "itl",
        "e2e_mean",
    ]


def test_a_peer_whose_engines_differ_is_compared_roughly() -> None:
    """As round robin shows."""
    found = compared(
        cell(
            Row(OURS, "kv", figures(0.6, 110)),
            Row(OURS, "round_robin", figures(0.2, 200)),
            Row("Dynamo 1", "round_robin", figures(0.3, 300)),
            Row("Dynamo 1", "default", figures(0.8, 150)),
        ),
        "kv",
    )
    assert next(behind([found])).endswith("of Dynamo 1 default (rough: its round robin differs by 50%)")


def test_goodput_counts_requests_within_both_limits() -> None:
    """One short prompt is; a prompt of 120,000 tokens takes longer than 500 ms."""
    requests = (
        TraceRequest("short", 0, 100, 20, (1,)),
        TraceRequest("long", 0, 120_000, 20, tuple(range(2, 237))),
    )
    setup = Setup(policy="round_robin", workers=2)
    assert report_of(run(Trace("two", requests[:1]), setup)).goodput == 1.0
    assert report_of(run(Trace("two", requests), setup)).goodput == 0.5


def test_goodput_is_limited_by_the_time_between_tokens() -> None:
    """At 30 ms a step none of the requests is within it."""
    setup = Setup(policy="round_robin", workers=1)
    slow = setup.step_time._replace(decode_ms=(0.0, 0.0, 30.0))
    trace = Trace("one", (TraceRequest("short", 0, 100, 20, (1,)),))
    given = Setup(policy="round_robin", workers=1, step_time=slow)
    assert report_of(run(trace, given)).goodput == 0.0


def test_a_peers_summary_is_parsed() -> None:
    """With goodput where it reports single requests; a lost request or figure is an error."""
    assert parse(SUMMARY) == Figures(0.5, 10.0, 9.0, 30.0, 6.0, 100.0, 300.0, None)
    assert parse({**SUMMARY, "within_limits": 3}).goodput == 0.75
    with pytest.raises(ConfigError, match="completed 3 of 4"):
        parse({**SUMMARY, "completed_requests": 3})
    with pytest.raises(ConfigError, match="mean_itl_ms"):
        parse({name: value for name, value in SUMMARY.items() if name != "mean_itl_ms"})


def test_an_interpreter_that_is_missing_or_lacks_the_peer_is_named() -> None:
    """Before anything is simulated."""
    with pytest.raises(ConfigError, match=r"--peer-python /nowhere/python: No such file.*ai-dynamo"):
        command.run(ZooOptions(peer_python=("/nowhere/python",)), (), peer=False, as_json=False)
    with pytest.raises(ConfigError, match=r"No module named.*install ai-dynamo"):
        find_peer(sys.executable)
    with pytest.raises(ConfigError, match=r"replay of ai-dynamo 9 failed.*ai-dynamo"):
        replay(PeerInstall(sys.executable, "9"), [PeerRun("x", 1, 100)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ZooOptions(classes="agents,nonsense"),
            "--classes agents,nonsense: unknown nonsense; choose from agents",
        ),
        (ZooOptions(loads="full"), "--loads full: unknown full"),
        (ZooOptions(policies="best"), "--policies best: unknown best"),
    ],
)
def test_unknown_names_are_refused(options: ZooOptions, message: str) -> None:
    """With what can be chosen."""
    with pytest.raises(ConfigError, match=message):
        command.run(options, (), peer=False, as_json=False)


def test_a_small_zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One cell of two policies: the traces are kept, round robin is added, and both forms of output have the rows."""
    options = ZooOptions(classes="hot", loads="light", policies="kv", requests=20, write=str(tmp_path))
    found = command.compare_all(plan_of(options, (2,)), [])
    assert [(row.replay, row.policy) for row in found.cells[0].rows] == [(OURS, "kv"), (OURS, "round_robin")]
    assert len((tmp_path / "hot.2.light.jsonl").read_bytes().splitlines()) == 40
    command.show(found, as_json=False)
    text = capsys.readouterr().out
    assert "hot, 2 workers, light: 40 requests" in text
    assert f"{found.cells[0].best['ttft_mean'].ratio:.3f} rr" in text
    command.show(found, as_json=True)
    assert json.loads(capsys.readouterr().out)["cells"][0]["rows"][0]["policy"] == "kv"
