"""LoRA adapters made up for tests, in the layout of PEFT."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS = 2
SIZE = 0.5
"""Large enough to change what is likeliest."""


def make(folder: Path, model: Path, seed: int, rank: int = 4) -> Path:
    """Random weights for the query, value and output projections of the first layers of `model`, by `seed`."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head, "o_proj": hidden}
    inputs = {"q_proj": hidden, "v_proj": hidden, "o_proj": heads * head}
    random = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        for name, size in outputs.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a, b = random.normal(0, SIZE, (rank, inputs[name])), random.normal(0, SIZE, (size, rank))
            weights[f"{key}.lora_A.weight"] = a.astype(np.float32)
            weights[f"{key}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(outputs),
        "bias": "none",
        "base_model_name_or_path": "",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
