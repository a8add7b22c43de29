"""Model folders with a real model's configuration and no weights, so that benchmarks need no download."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    },
    # Small enough for a CPU; heads of 32 are the least that vLLM's CPU attention takes.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    },
}

LOAD_FORMAT = "headwater-random"
"""vLLM's `load_format` for the weights of `gpu.weights.scaled`, with `WEIGHTS_EXTENSION` as `worker_extension_cls`."""

WEIGHTS_EXTENSION = "tests.bench.gpu.weights.vllm.ScaledWeights"

SGLANG_MODELS = "tests.bench.gpu.weights.sglang"
"""Value of SGLANG_EXTERNAL_MODEL_PACKAGE for the same weights in SGLang."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make(folder: Path, shape: str) -> Path:
    """Write config and tokenizer of `shape` (a name in SHAPES) into `folder`; load it with dummy weights."""
    return write(folder, _config(shape), SPECIAL)


def write(folder: Path, config: dict[str, Any], special: Sequence[str]) -> Path:
    """Write a model's config, and a tokenizer with these special tokens first, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(_tokenizer(int(config["vocab_size"]), special).to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": special[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def _config(shape: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **SHAPES[shape],
    }


def kv_bytes_per_token(shape: str) -> int:
    """Bytes of keys and values of one token over all layers."""
    config = SHAPES[shape]
    width = 2 if config["torch_dtype"] == "bfloat16" else 4
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * width)


def _tokenizer(vocabulary: int, special: Sequence[str]) -> Tokenizer:
    """A token per byte of text; the other ids are words that only answers contain, so that each has a text."""
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"w{number}" for number in range(len(pieces), vocabulary)]
    made = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    return made
