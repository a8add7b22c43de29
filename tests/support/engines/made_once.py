"""Folders of models that are made once, in the user's cache folder, and the random weights of those with Llama's layers."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwater.ops.start import model

NORMS = ("input_layernorm", "post_attention_layernorm")


def made_once(name: str, write: Callable[[Path], object]) -> Path:
    """The folder `name`, with what `write` puts into it."""
    folder = model.ensure().parent / name
    if folder.is_dir():
        return folder
    making = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    write(making)
    try:
        os.rename(making, folder)
    except OSError:
        # Another test process was faster.
        shutil.rmtree(making)
    return folder


def llama_weights(
    config: dict[str, Any], seed: int, scale: float = 1.0, norms: Sequence[str] = NORMS
) -> dict[str, Any]:
    """Weights of a model with this configuration, whose heads of queries and keys are of equal number.

    Not torch's: its threads would be missing in the engines that are forked from this process, which wait for them.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    vocabulary, hidden, inner = (config[f"{name}_size"] for name in ("vocab", "hidden", "intermediate"))

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {name: matrix(vocabulary, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{at}.self_attn.{name}.weight"] = matrix(hidden, hidden)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            weights[f"{at}.mlp.{name}_proj.weight"] = matrix(rows, columns)
        weights |= {f"{at}.{name}.weight": np.ones(hidden, np.float32) for name in norms}
    return weights
