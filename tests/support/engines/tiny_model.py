"""A model small enough to compute hundreds of prompts on a CPU in seconds, whose answers depend on every token.

Two layers with random weights, large enough that no two prompts get the same answer and that the wrong KV shows; the
template is the small real model's, and so is the tokenizer, with fewer tokens. Made once, in the user's cache folder.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from headwater.ops.start import model
from tests.support.engines.short_vocabulary import SIZE, shortened

HIDDEN, INNER, LAYERS, EOS = 64, 128, 2, 2
SCALE = 0.3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "initializer_range": SCALE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "vocab_size": SIZE,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
EOS_SCALE = 2.15
"""Makes the end token the likeliest about every twentieth time."""
NAME = "tiny-llama-5"


def ensure() -> Path:
    """The model's folder."""
    return _made(NAME, {}, {})


def ensure_scorer() -> Path:
    """The same model with a head for one class: a score of its prompt."""
    import numpy as np

    head = (np.random.default_rng(11).standard_normal((1, HIDDEN)) * SCALE).astype(np.float32)
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    return _made(f"{NAME}-scorer", config, {"score.weight": head})


def _made(folder_name: str, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    source = model.ensure()
    folder = source.parent / folder_name
    if folder.is_dir():
        return folder
    making = Path(tempfile.mkdtemp(prefix=f"{folder_name}-", dir=source.parent))
    (making / "config.json").write_text(json.dumps({**CONFIG, **config}))
    tokenizer = shortened(json.loads((source / "tokenizer.json").read_text()))
    (making / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in COPIED:
        if (source / name).exists():
            shutil.copy(source / name, making / name)
    _write_weights(making, weights)
    try:
        os.rename(making, folder)
    except OSError:
        # Another test process was faster.
        shutil.rmtree(making)
    return folder


def _write_weights(folder: Path, more: dict[str, Any]) -> None:
    # Not torch: its threads would be missing in the engines that are forked from this process, which wait for them.
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(7)
    hidden, inner, scale = HIDDEN, INNER, SCALE

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(SIZE, hidden),
        "lm_head.weight": matrix(SIZE, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    weights["lm_head.weight"][EOS] *= EOS_SCALE
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{at}.self_attn.{name}.weight"] = matrix(hidden, hidden)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
        weights[f"{at}.input_layernorm.weight"] = np.ones(hidden, np.float32)
        weights[f"{at}.post_attention_layernorm.weight"] = np.ones(hidden, np.float32)
    save_file(weights | more, folder / "model.safetensors")
