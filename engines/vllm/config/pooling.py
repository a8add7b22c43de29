"""What a pooling model of vLLM computes of a prompt: its tasks, and the parameters that they need."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from headwater.engines.engine import RequestRejected

POOLING: Final = ("embed", "classify", "score", "token_embed", "token_classify")
"""Tasks of vLLM's pooling models that return vectors."""


class VllmPooling(NamedTuple):
    """`tasks` of `Engine.embed` that the model supports, `score_task` is vLLM's name of the task that scores pairs.

    `segmented`: its tokens have types, which distinguish the texts of a pair.
    """

    tasks: tuple[str, ...] = ()
    score_task: str = "score"
    segmented: bool = False

    def params(self, task: str, dimensions: int, segment: int) -> dict[str, Any]:
        """The arguments of vLLM's `PoolingParams` for a prompt whose second text starts at `segment`, 0: it has none. Raises `RequestRejected`."""
        if task not in self.tasks:
            raise RequestRejected(
                f"{task!r} is not supported by this model; supported: {', '.join(self.tasks)}"
            )
        params: dict[str, Any] = {"task": self.score_task if task == "score" else task}
        if dimensions:
            params["dimensions"] = dimensions
        if self.segmented and segment:
            # What vLLM's own API makes of a tokenizer's type ids: the position of the first 1.
            params["extra_kwargs"] = {"compressed_token_type_ids": segment}
        return params


def pooling_of(tasks: Sequence[str], config: Any) -> VllmPooling:
    """The tasks of the model with these tasks of vLLM and this configuration of Hugging Face.

    A classifier with one class scores pairs: the task that vLLM had for it is `classify` since.
    """
    found = [task for task in POOLING if task in tasks]
    score_task = "score" if "score" in tasks else "classify"
    if "score" not in found and "classify" in found and getattr(config, "num_labels", 0) == 1:
        found.append("score")
    segmented = int(getattr(config, "type_vocab_size", 0) or 0) > 1
    return VllmPooling(tuple(found), score_task, segmented)
