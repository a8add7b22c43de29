"""A diffusion language model that SGLang computes on a CPU: its weights are random, and it fills blocks of four tokens."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from headwater.ops.start import model
from tests.support.engines.made_once import NORMS, llama_weights, made_once

BLOCK: Final = 4
"""Tokens of a block: SGLang has it, and the number of the mask token, in its own code for this architecture."""

VOCABULARY: Final = 151_680
"""More than the number of the mask token."""

HIDDEN, INNER, LAYERS = 16, 32, 1
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NAME = "tiny-sdar-3"
CONFIG: dict[str, Any] = {
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
    return made_once(NAME, _write)


def _write(folder: Path) -> None:
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in TOKENIZER:
        shutil.copy(model.ensure() / name, folder)
    norms = ("self_attn.q_norm", "self_attn.k_norm", *NORMS)
    save_file(llama_weights(CONFIG, 13, norms=norms), folder / "model.safetensors")
