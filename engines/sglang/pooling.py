"""What SGLang's models that do not generate compute of a prompt: a vector, the shares of classes, or a score."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.engines.engine import EngineUnavailable, RequestRejected

EMBED: Final = "embed"
CLASSIFY: Final = "classify"
SCORE: Final = "score"

CLASSIFIERS: Final = "Classification"
"""Part of the names of architectures with a head for classes."""

FIRST_TOKEN: Final = frozenset({"BertModel", "Contriever", "XLMRobertaModel"})
"""Architectures of which SGLang returns the first token's state, whatever the model's files say."""

POOLING_FILE: Final = Path("1_Pooling", "config.json")
"""Where models of Sentence Transformers say how they pool: a flag for each mode, or in newer ones its name."""


class ModelPooling(NamedTuple):
    """The tasks of `Engine.embed` that a model supports. `form` is how its logits become shares.

    `segmented`: its tokens have types, which distinguish the texts of a pair.
    """

    tasks: tuple[str, ...] = (EMBED,)
    form: str = ""
    segmented: bool = False

    def check(self, task: str, segments: Sequence[int]) -> None:
        """Raises `RequestRejected` for what this model cannot compute."""
        if task not in self.tasks:
            raise RequestRejected(
                f"{task!r} is not supported by this model; supported: {', '.join(self.tasks)}"
            )
        if self.segmented and any(segments):
            raise RequestRejected(
                "SGLang accepts no token types with token ids, which this model needs for pairs of texts"
            )

    def finish(self, values: Sequence[float] | float) -> NDArray[np.float32]:
        """The answer for what SGLang returns, one-dimensional. Of classes it returns logits, and of one class a number."""
        found = np.asarray(values, np.float32).reshape(-1)
        if self.form == "softmax":
            powers = np.exp(found - found.max())
            return np.asarray(powers / powers.sum(), np.float32)
        if self.form == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-found)), np.float32)
        return found


def check_mode(folder: Path) -> None:
    """Raises `EngineUnavailable` for a model of which SGLang would compute other vectors than the model is made for."""
    config, pooling = _json(folder / "config.json"), _json(folder / POOLING_FILE)
    found = FIRST_TOKEN.intersection(config.get("architectures") or ())
    if not pooling or not found:
        return
    modes = [name for name, used in pooling.items() if name.startswith("pooling_mode_") and used is True]
    named = pooling.get("pooling_mode")
    if (named == "cls") if named else (modes == ["pooling_mode_cls_token"]):
        return
    raise EngineUnavailable(
        f"{folder.name} pools by {named or ' and '.join(modes)}, and SGLang takes the first token's state of {min(found)}, so "
        "its vectors would be wrong: serve the model with vLLM"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        # SGLang reports what is wrong with files that it needs.
        return {}
    return document if isinstance(document, dict) else {}


def pooling_of(config: Any) -> ModelPooling:
    """The tasks of the model with this configuration of Hugging Face.

    Its classes are computed as transformers and vLLM define them: `problem_type` says how, unless SGLang has applied the
    function that a model of Sentence Transformers names. One class is a score.
    """
    architectures = getattr(config, "architectures", None) or ()
    if not any(CLASSIFIERS in name for name in architectures):
        return ModelPooling()
    labels = int(getattr(config, "num_labels", 1))
    segmented = int(getattr(config, "type_vocab_size", 0) or 0) > 1
    tasks = (CLASSIFY, SCORE) if labels == 1 and not segmented else (CLASSIFY,)
    problem = getattr(config, "problem_type", None)
    if problem == "regression" or getattr(config, "sbert_ce_default_activation_function", None):
        return ModelPooling(tasks, "", segmented)
    several = problem == "single_label_classification" or (problem is None and labels > 1)
    return ModelPooling(tasks, "softmax" if several and labels > 1 else "sigmoid", segmented)
