"""A model small enough to compute hundreds of prompts on a CPU in seconds, whose answers depend on every token.

Two layers with random weights, large enough that no two prompts get the same answer and that the wrong KV shows; the
tokenizer and template are the small real model's. Made once, in the user's cache folder.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from headwater.ops import demo_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NAME = "tiny-llama-1"


def ensure() -> Path:
    """The model's folder."""
    source = demo_model.ensure()
    folder = source.parent / NAME
    if folder.is_dir():
        return folder
    making = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=source.parent))
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    (making / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocabulary}))
    for name in COPIED:
        if (source / name).exists():
            shutil.copy(source / name, making / name)
    _write_weights(making, vocabulary)
    try:
        os.rename(making, folder)
    except OSError:
        # Another test process was faster.
        shutil.rmtree(making)
    return folder


def _write_weights(folder: Path, vocabulary: int) -> None:
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(7)
    hidden, inner, scale = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["initializer_range"]

    def matrix(rows: object, columns: object) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * scale

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "lm_head.weight": matrix(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(int(str(CONFIG["num_hidden_layers"]))):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{at}.self_attn.{name}.weight"] = matrix(hidden, hidden)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
        weights[f"{at}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
