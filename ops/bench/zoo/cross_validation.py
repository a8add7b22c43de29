"""`--study cross-validation`: weights of `kv` chosen on all classes of traffic but one, and what they give on that one.

The score of weights on a cell is the geometric mean of the TTFT mean, the ITL and the E2E mean, each divided by that of the default
weights: below 1 is better than the default. Per fold the weights with the lowest mean score (of its logarithm, over the cells of the other
classes) are chosen. So no class chooses the weights that it is measured with.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from headwater.ops.bench.report import machine
from headwater.ops.bench.zoo.cells import Plan, Variant, run_cells
from headwater.ops.bench.zoo.compare import Cell
from headwater.ops.bench.zoo.figures import Figures
from headwater.ops.config.errors import ConfigError
from headwater.ops.process.text_table import table
from headwater.schemas.events.route import Weights

GRID: Final[dict[str, tuple[float, ...]]] = {
    "crowding": (0.02, 0.05, 0.1, 0.25),
    "arrivals": (2.0, 5.0, 15.0),
    "memory": (100.0, 300.0, 900.0),
    "queued": (0.0, 0.5, 1.0),
}
"""The values tried of each weight, in all combinations: around the default."""

SCORED: Final = ("ttft_mean", "itl", "e2e_mean")

DEFAULT: Final = "default"

Scores = Mapping[str, Mapping[str, float]]
"""Logarithm of the score, by cell and then by the name of the weights."""


class Fold(msgspec.Struct, frozen=True):
    """One class left out: the weights that all others choose, and what they give on it.

    Ratios to the default weights, geometric means over the cells of the class. `best_possible`: the score if the class itself had chosen.
    """

    traffic: str
    chosen: str
    score: float
    ttft_mean: float
    itl: float
    e2e_mean: float
    ttft_p99: float
    best_possible: float


class CrossValidation(msgspec.Struct, frozen=True):
    """All folds; `overall`: their geometric mean, and `chosen_by_all` the weights that all classes together choose."""

    machine: str
    seed: int
    tried: int
    folds: list[Fold]
    overall: float
    chosen_by_all: str
    score_of_all: float


def study(plan: Plan) -> CrossValidation:
    """Run all cells with all weights of the grid. Raises `ConfigError` for a single class."""
    if len(plan.classes) < 2:
        raise ConfigError(
            "--study cross-validation leaves out one class after another: give at least two --classes"
        )
    variants = [Variant(DEFAULT, "kv"), *grid()]
    cells = run_cells(plan._replace(policies=[]), [], variants)
    return validate(cells, [one.name for one in variants], machine(), plan.options.seed)


def grid() -> list[Variant]:
    """All combinations of the grid."""
    combinations = itertools.product(*GRID.values())
    found = [dict(zip(GRID, values, strict=True)) for values in combinations]
    return [
        Variant(
            " ".join(f"{name} {value:g}" for name, value in one.items()),
            "kv",
            msgspec.structs.replace(Weights(), **one),
        )
        for one in found
    ]


def validate(cells: Sequence[Cell], names: Sequence[str], on: str, seed: int) -> CrossValidation:
    """The folds, from cells with a row for each of the `names`."""
    classes = list(dict.fromkeys(cell.traffic for cell in cells))
    figures = {cell.name: {row.policy: row.figures for row in cell.rows} for cell in cells}
    scores = {cell: {name: _score(of[name], of[DEFAULT]) for name in names} for cell, of in figures.items()}
    folds = []
    for left_out in classes:
        mine = [cell.name for cell in cells if cell.traffic == left_out]
        others = [cell.name for cell in cells if cell.traffic != left_out]
        chosen = choose(scores, others, names)
        ratio = {
            name: _mean_ratio(
                [
                    (getattr(figures[cell][chosen], name), getattr(figures[cell][DEFAULT], name))
                    for cell in mine
                ]
            )
            for name in (*SCORED, "ttft_p99")
        }
        best = choose(scores, mine, names)
        folds.append(
            Fold(
                left_out,
                chosen,
                _mean_score(scores, mine, chosen),
                ratio["ttft_mean"],
                ratio["itl"],
                ratio["e2e_mean"],
                ratio["ttft_p99"],
                _mean_score(scores, mine, best),
            )
        )
    every = [cell.name for cell in cells]
    all_choose = choose(scores, every, names)
    overall = math.exp(sum(math.log(fold.score) for fold in folds) / len(folds))
    return CrossValidation(
        on, seed, len(names), folds, overall, all_choose, _mean_score(scores, every, all_choose)
    )


def choose(scores: Scores, cells: Sequence[str], names: Sequence[str]) -> str:
    """The weights with the lowest mean score on these cells; the first of equals, so the default if nothing is better."""
    return min(names, key=lambda name: sum(scores[cell][name] for cell in cells))


def _mean_score(scores: Scores, cells: Sequence[str], name: str) -> float:
    return math.exp(sum(scores[cell][name] for cell in cells) / len(cells))


def _score(figures: Figures, default: Figures) -> float:
    return sum(math.log(getattr(figures, name) / getattr(default, name)) for name in SCORED) / len(SCORED)


def _mean_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return math.exp(sum(math.log(one / other) for one, other in pairs) / len(pairs))


def show(report: CrossValidation, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    print(
        f"whatif --zoo --study cross-validation: seed {report.seed}, {report.tried} weights tried, machine {report.machine}\n"
    )
    rows = [
        (
            one.traffic,
            f"{one.score:.3f}",
            f"{one.ttft_mean:.3f}",
            f"{one.ttft_p99:.3f}",
            f"{one.itl:.3f}",
            f"{one.e2e_mean:.3f}",
            f"{one.best_possible:.3f}",
            one.chosen,
        )
        for one in report.folds
    ]
    heads = (
        "left out",
        "score",
        "TTFT mean",
        "p99",
        "ITL",
        "E2E mean",
        "best possible",
        "weights that the others choose",
    )
    print(table(heads, rows))
    print(
        f"\nDivided by the default weights; below 1 is better. Out of fold, all classes: {report.overall:.4f}"
    )
    print(f"All classes together choose {report.chosen_by_all}: {report.score_of_all:.4f}")
