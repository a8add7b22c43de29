"""The zoo's distances from bounds: ratios per policy, and none where figures and bounds are of different requests."""

import pytest

from tests.bench.bounds.bound import BoundFigures, TraceBounds
from tests.bench.bounds.ratios import HEADS
from tests.bench.zoo.bounds import bound_table, to_queueing
from tests.bench.zoo.cells import plan_of, run_cells
from tests.bench.zoo.compare import OURS, Cell, Row
from tests.bench.zoo.figures import Figures
from tests.bench.zoo.options import ZooOptions

pytestmark = pytest.mark.soak
"""They test tools of ours."""

FIGURES = Figures(0.4, 150.0, 1.0, 1.0, 1.0, 3_000.0, 1.0)
BOUNDS = TraceBounds(
    100, BoundFigures(100.0, 1_000.0, 0.8), BoundFigures(120.0, 1_200.0, 0.5), BoundFigures(125.0, 2_000.0)
)


def cell(*rows: Row) -> Cell:
    """With these rows and `BOUNDS`."""
    return Cell("hot", "heavy", 8, 2_000, 100, 5.0, list(rows), bounds=BOUNDS)


def test_figures_are_divided_by_each_bound() -> None:
    """In the order of the heads."""
    row = Row(OURS, "kv", FIGURES, 100)
    assert to_queueing(cell(row), row) == ("1.200", "1.500")
    head, _, line = bound_table([cell(row)], "kv").splitlines()
    assert all(name in head for name in HEADS)
    assert line.split()[3:] == ["0.500", "0.800", "1.500", "1.250", "1.200", "3.000", "2.500", "1.500"]


def test_other_requests_are_not_compared() -> None:
    """A peer's engines are others; with a refused request the means are of fewer."""
    for row in (Row("Dynamo 9", "default", FIGURES, 100), Row(OURS, "kv", FIGURES, 99)):
        assert to_queueing(cell(row), row) == ("-", "-")
        assert "hot" not in bound_table([cell(row)], row.policy)


def test_cells_have_bounds_that_no_policy_beats() -> None:
    """Of the fleet of each class."""
    options = ZooOptions(
        classes="two_speeds,single_turn", loads="heavy", policies="kv,least_loaded", requests=12
    )
    for found in run_cells(plan_of(options, (2,)), []):
        assert found.bounds is not None
        for row in found.rows:
            assert row.served == found.bounds.requests == 24
            assert row.figures.ttft_mean >= found.bounds.queueing.ttft_mean > 0
            assert row.figures.e2e_mean >= found.bounds.queueing.e2e_mean > 0
            assert row.figures.reuse <= (found.bounds.unlimited.reuse or 0) + 1e-9


@pytest.mark.parametrize("bound", [0.0, None])
def test_a_bound_of_nothing_has_no_ratio(bound: float | None) -> None:
    """As the reuse of traffic without anything in common."""
    row = Row(OURS, "kv", FIGURES, 100)
    none = TraceBounds(
        100, BoundFigures(1.0, 1.0, bound), BoundFigures(1.0, 1.0, bound), BoundFigures(1.0, 1.0)
    )
    found = Cell("cold", "light", 8, 2_000, 100, 5.0, [row], bounds=none)
    assert bound_table([found], "kv").splitlines()[-1].split()[3:5] == ["-", "-"]
