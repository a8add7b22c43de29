"""What pooling models compute, by vLLM's tasks and their configuration."""

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.engines.engine import RequestRejected
from headwater.engines.vllm.config import VllmPooling, pooling_of

CLASSIFIES = ("classify", "token_classify")


def of(*tasks: str, **fields: Any) -> VllmPooling:
    """The pooling of a model with these tasks, and these fields in its configuration."""
    return pooling_of(tasks, SimpleNamespace(**fields))


@pytest.mark.parametrize(
    ("pooling", "tasks"),
    [
        (of("generate"), ()),
        (of("token_embed", "embed"), ("embed", "token_embed")),
        (of(*CLASSIFIES, num_labels=3), CLASSIFIES),
        (of(*CLASSIFIES, num_labels=1), (*CLASSIFIES, "score")),
        # An earlier release's own.
        (of("score", "classify", num_labels=1), ("classify", "score")),
    ],
)
def test_one_class_is_a_score(pooling: VllmPooling, tasks: tuple[str, ...]) -> None:
    """Tasks of which nothing is returned as a vector are left out."""
    assert pooling.tasks == tasks


def test_parameters_of_a_prompt() -> None:
    """The score has vLLM's name, and types are given for the second text of a pair where the model has them."""
    bert = of(*CLASSIFIES, num_labels=1, type_vocab_size=2)
    assert bert.params("score", 0, 7) == {
        "task": "classify",
        "extra_kwargs": {"compressed_token_type_ids": 7},
    }
    assert bert.params("classify", 0, 0) == {"task": "classify"}
    assert of(*CLASSIFIES, num_labels=1, type_vocab_size=1).params("score", 0, 7) == {"task": "classify"}
    assert of("score", num_labels=1).params("score", 0, 7) == {"task": "score"}
    assert of("embed").params("embed", 4, 0) == {"task": "embed", "dimensions": 4}
    with pytest.raises(RequestRejected, match="'score' is not supported by this model; supported: classify"):
        of(*CLASSIFIES, num_labels=3).params("score", 0, 0)
