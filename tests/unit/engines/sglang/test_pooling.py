"""What models that do not generate compute, by their configuration."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headwater.engines.engine import EngineUnavailable, RequestRejected
from headwater.engines.sglang.sampling import POOLING_FILE, ModelPooling, check_mode, pooling_of

LLAMA = "LlamaForSequenceClassification"


def of(architecture: str = LLAMA, **fields: Any) -> ModelPooling:
    """The pooling of a model with these fields in its configuration."""
    return pooling_of(SimpleNamespace(architectures=[architecture], **fields))


@pytest.mark.parametrize(
    ("pooling", "tasks", "form"),
    [
        (of("LlamaModel"), ("embed",), ""),
        (of(num_labels=3), ("classify",), "softmax"),
        (of(num_labels=1), ("classify", "score"), "sigmoid"),
        (of(num_labels=1, problem_type="regression"), ("classify", "score"), ""),
        (of(num_labels=3, problem_type="multi_label_classification"), ("classify",), "sigmoid"),
        (of(num_labels=1, problem_type="single_label_classification"), ("classify", "score"), "sigmoid"),
        (
            of(num_labels=1, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"),
            ("classify", "score"),
            "",
        ),
        (of("BertForSequenceClassification", num_labels=1, type_vocab_size=2), ("classify",), "sigmoid"),
        (
            of("XLMRobertaForSequenceClassification", num_labels=1, type_vocab_size=1),
            ("classify", "score"),
            "sigmoid",
        ),
    ],
)
def test_tasks_follow_from_the_configuration(
    pooling: ModelPooling, tasks: tuple[str, ...], form: str
) -> None:
    """One class is a score; the function is the one that transformers and vLLM apply."""
    assert (pooling.tasks, pooling.form) == (tasks, form)


def test_logits_become_shares() -> None:
    """Shares of exclusive classes sum to one, also where the logits are large; others are independent."""
    shares = of(num_labels=3).finish([1000.0, 1000.0, 999.0])
    assert shares.sum() == pytest.approx(1)
    assert shares[0] == shares[1] == pytest.approx(shares[2] * np.e, rel=1e-5)
    assert of(num_labels=1).finish(0.0).tolist() == [0.5]
    assert of("LlamaModel").finish([3.0, -4.0]).tolist() == [3.0, -4.0]


def test_what_a_model_cannot_compute_is_rejected() -> None:
    """By the task's name; and pairs of texts where their types would be ignored."""
    with pytest.raises(RequestRejected, match="'embed' is not supported by this model; supported: classify"):
        of(num_labels=3).check("embed", ())
    bert = of("BertForSequenceClassification", num_labels=2, type_vocab_size=2)
    bert.check("classify", (0,))
    with pytest.raises(RequestRejected, match="token types"):
        bert.check("classify", (0, 5))
    of(num_labels=1).check("score", (5,))


MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def folder_of(path: Path, architecture: str, pooling: dict[str, Any] | None) -> Path:
    """A model's folder with these files."""
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if pooling is not None:
        (path / POOLING_FILE).parent.mkdir()
        (path / POOLING_FILE).write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    return path


@pytest.mark.parametrize(
    "pooling", [MEAN, {"pooling_mode": "mean"}, {**MEAN, **CLS, "pooling_mode_mean_tokens": True}]
)
def test_vectors_that_would_be_wrong_are_refused_at_the_start(
    tmp_path: Path, pooling: dict[str, Any]
) -> None:
    """SGLang takes the first token's state of an encoder, whatever the model says."""
    with pytest.raises(EngineUnavailable, match=r"pools by .*mean.* serve the model with vLLM"):
        check_mode(folder_of(tmp_path, "BertModel", pooling))


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [("BertModel", CLS), ("BertModel", {"pooling_mode": "cls"}), ("BertModel", None), ("Qwen3Model", MEAN)],
)
def test_other_models_are_not(tmp_path: Path, architecture: str, pooling: dict[str, Any] | None) -> None:
    """Those that pool by the first token, or do not say how, and those of other architectures."""
    check_mode(folder_of(tmp_path, architecture, pooling))
    check_mode(tmp_path / "missing")
