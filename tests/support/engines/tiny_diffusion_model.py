"""A diffusion language model that SGLang computes on a CPU: its weights are random, and it fills blocks of four tokens."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from headwater.ops.start import model

BLOCK: Final = 4
"""Tokens of a block: SGLang has it, and the number of the mask token, in its own code for this architecture."""

VOCABULARY: Final = 151_680
"""More than the number of the mask token."""

HIDDEN, INNER, LAYERS = 16, 32, 1
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NAME = "tiny-sdar-3"
CONFIG = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HIDDEN,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "use_sliding_window": False,
}


def ensure() -> Path:
    """The model's folder, in the user's cache. Its tokenizer is the default model's, which has a third of its tokens."""
    source = model.ensure()
    parent = source.parent
    folder = parent / NAME
    if folder.is_dir():
        return folder
    making = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=parent))
    (making / "config.json").write_text(json.dumps(CONFIG))
    _write_weights(making)
    for name in TOKENIZER:
        shutil.copy(source / name, making)
    try:
        os.rename(making, folder)
    except OSError:
        # Another test process was faster.
        shutil.rmtree(making)
    return folder


def _write_weights(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(13)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return draw.standard_normal((rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{at}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(weights, folder / "model.safetensors")
