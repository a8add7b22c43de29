"""Studies of the zoo: the curve of a weight with what lies outside it, and weights chosen on other classes."""

import json

import pytest

from headwater.ops.bench.zoo import command
from headwater.ops.bench.zoo.compare import OURS, Cell, Row
from headwater.ops.bench.zoo.cross_validation import DEFAULT, grid, validate
from headwater.ops.bench.zoo.figures import Figures
from headwater.ops.bench.zoo.frontier import FrontierReport, outside, trace_curve
from headwater.ops.bench.zoo.options import ZooOptions
from headwater.ops.config.errors import ConfigError
from headwater.schemas.events.route import Weights


def figures(ttft: float, itl: float, e2e: float = 1_000.0) -> Figures:
    """A reuse of one half, and equal means and percentiles."""
    return Figures(0.5, ttft, ttft, ttft, itl, e2e, e2e)


def cell(*rows: Row, traffic: str = "hot") -> Cell:
    """One cell with these replays."""
    return Cell(traffic, "heavy", 8, 2_000, 100, 5.0, list(rows))


def test_a_point_is_outside_if_no_value_of_the_weight_is_as_good_in_both_times() -> None:
    """Within 1 %; a peer's times relative to its own round robin, which is no point itself."""
    found = trace_curve(
        cell(
            Row(OURS, "crowding 0", figures(100, 20)),
            Row(OURS, "crowding 1", figures(150, 10)),
            Row(OURS, "round_robin", figures(300, 30)),
            Row(OURS, "lmetric", figures(120, 15)),
            Row("Dynamo 1", "round_robin", figures(600, 60)),
            Row("Dynamo 1", "default", figures(198.5, 41)),
            Row("Dynamo 1", "tuned", figures(197, 60)),
        ),
        {"crowding 0", "crowding 1"},
    )
    assert [(one.name, one.ttft_mean, one.itl) for one in found.curve] == [
        ("crowding 0", 100, 20),
        ("crowding 1", 150, 10),
    ]
    assert {one.name: one.outside for one in found.others} == {
        "round_robin": False,
        "lmetric": True,
        "Dynamo 1 default": False,
        "Dynamo 1 tuned": True,
    }
    tuned = found.others[-1]
    assert (tuned.ttft_mean, tuned.itl, tuned.rough) == (98.5, 30, True)
    report = FrontierReport("here", 1, "crowding", 1.0, 0.01, [found])
    assert list(outside(report)) == [
        "outside: hot, 8 workers, heavy: lmetric",
        "outside: hot, 8 workers, heavy: Dynamo 1 tuned (rough)",
    ]


def test_a_class_is_measured_with_the_weights_that_the_others_choose() -> None:
    """`a` and `b` gain from one weight and `c` loses: so `c` is told its loss, and not what it would have chosen itself."""
    cells = [
        cell(Row(OURS, DEFAULT, figures(100, 10)), Row(OURS, "x", figures(ttft, 10)), traffic=name)
        for name, ttft in (("a", 80.0), ("b", 64.0), ("c", 110.0))
    ]
    found = validate(cells, [DEFAULT, "x"], "here", 1)
    by_class = {fold.traffic: fold for fold in found.folds}
    assert [by_class[name].chosen for name in "abc"] == ["x", "x", "x"]
    assert by_class["c"].ttft_mean == pytest.approx(1.1)
    assert by_class["c"].score == pytest.approx(1.1 ** (1 / 3))
    assert by_class["c"].best_possible == 1.0
    assert found.overall == pytest.approx((0.8 * 0.64 * 1.1) ** (1 / 9))
    assert found.chosen_by_all == "x"
    # Nothing is better than the default where no other weights are.
    worse = [msg for msg in cells if msg.traffic == "c"]
    assert validate([*worse, cell(*worse[0].rows, traffic="d")], [DEFAULT, "x"], "here", 1).overall == 1.0


def test_the_grid_has_the_default() -> None:
    """Otherwise the search would not be around it."""
    assert Weights() in [one.weights for one in grid()]


def test_studies_from_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The curve of a small cell has the default, and what cannot be studied is refused."""
    options = ZooOptions(study="frontier", classes="hot", loads="light", policies="round_robin", requests=20)
    command.run(options, (2,), peer=False, as_json=True)
    frontier = json.loads(capsys.readouterr().out)["frontiers"][0]
    assert f"crowding {Weights().crowding:g}" in [one["name"] for one in frontier["curve"]]
    assert [one["name"] for one in frontier["others"]] == ["round_robin"]
    command.run(options, (2,), peer=False, as_json=False)
    assert "default" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"all 10 requests of hot arrive at once: give more --requests"):
        command.run(options._replace(requests=5), (2,), peer=False, as_json=False)
    with pytest.raises(ConfigError, match="at least two --classes"):
        command.run(options._replace(study="cross-validation"), (2,), peer=False, as_json=False)
