"""A model small enough to compute hundreds of prompts on a CPU in seconds, whose answers depend on every token.

Two layers with random weights, large enough that no two prompts get the same answer and that the wrong KV shows; the
template is the small real model's, and so is the tokenizer, with fewer tokens. Made once, in the user's cache folder.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from headwater.ops.start import model
from tests.support.engines.made_once import llama_weights, made_once
from tests.support.engines.short_vocabulary import SIZE, shortened

HIDDEN, INNER, LAYERS, EOS = 64, 128, 2, 2
SCALE = 0.3
CONFIG: dict[str, Any] = {
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
    return made_once(NAME, partial(_write, {}, {}))


def ensure_scorer() -> Path:
    """The same model with a head for one class: a score of its prompt."""
    import numpy as np

    head = (np.random.default_rng(11).standard_normal((1, HIDDEN)) * SCALE).astype(np.float32)
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    return made_once(f"{NAME}-scorer", partial(_write, config, {"score.weight": head}))


def _write(config: dict[str, Any], more: dict[str, Any], folder: Path) -> None:
    from safetensors.numpy import save_file

    source = model.ensure()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    tokenizer = shortened(json.loads((source / "tokenizer.json").read_text()))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in COPIED:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    weights = llama_weights(CONFIG, 7, SCALE)
    weights["lm_head.weight"][EOS] *= EOS_SCALE
    save_file(weights | more, folder / "model.safetensors")
