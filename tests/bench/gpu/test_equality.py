"""The GPU comparison of answers: where they differ, by how much, and the names that engines resolve themselves."""

import ast
from pathlib import Path

import pytest

from tests.bench.gpu import model
from tests.bench.gpu.engine import EngineAnswer
from tests.bench.gpu.handoff.equality import FirstDifference, compare, first_difference, usual_gap
from tests.bench.gpu.handoff.pair import Answers

pytestmark = pytest.mark.soak
"""They test tools of ours."""


def answer(*places: dict[int, float]) -> EngineAnswer:
    """The likeliest token at each place."""
    tokens = tuple(max(place, key=lambda token: place[token]) for place in places)
    return EngineAnswer(tokens, None, 0.0, 0.0, 0, [], places)


ONE = answer({1: -0.1, 2: -2.0}, {3: -0.5, 4: -0.75})
OTHER = answer({1: -0.1, 2: -2.0}, {3: -0.75, 4: -0.625})


def test_the_gap_is_that_of_both_answers_at_the_first_different_token() -> None:
    assert first_difference(ONE, OTHER) == FirstDifference(1, 0.25, 0.125)
    assert first_difference(ONE, ONE) is None
    unlisted = answer({1: -0.1, 2: -2.0}, {5: -0.5, 6: -0.75})
    found = first_difference(ONE, unlisted)
    assert found is not None
    assert found.gap == float("inf")


def test_each_kind_of_pair_is_counted() -> None:
    """The engines differ, with and without a hand-off; each repeats itself."""
    found = {
        one.what: one for one in compare([Answers(OTHER, [ONE, ONE, ONE], [OTHER, OTHER], (ONE, OTHER))])
    }
    counted = {what: (one.pairs, len(one.differences)) for what, one in found.items()}
    assert counted == {
        "handed over, prefill engine alone": (1, 1),
        "handed over, decode engine alone": (1, 0),
        "prefill engine, decode engine": (1, 1),
        "both engines, another prompt": (1, 1),
        "prefill engine, itself": (2, 0),
        "decode engine, itself": (1, 0),
    }
    assert found["handed over, prefill engine alone"].largest_gap == 0.25
    assert usual_gap([Answers(OTHER, [ONE], [OTHER], (ONE, OTHER))]) == pytest.approx((1.9 + 0.25) / 2)


def test_the_worker_extension_is_where_vllm_looks_for_it() -> None:
    """By its name only: the module imports torch and vLLM's connectors."""
    module, _, name = model.WEIGHTS_EXTENSION.rpartition(".")
    assert name in classes(module)


def test_the_models_are_where_sglang_looks_for_them() -> None:
    """In a module of that package, by the architecture's name; every shape has this one."""
    assert "Qwen3ForCausalLM" in classes(model.SGLANG_MODELS + ".qwen3")


def classes(module: str) -> set[str]:
    """The classes of a module that is not imported here."""
    path = Path(model.__file__).parent.joinpath(*module.split(".")[4:]).with_suffix(".py")
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
