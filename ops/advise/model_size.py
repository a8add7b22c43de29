"""The size of a model, from its config.json: weights, work per token, and KV cache per token."""

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headwater.ops.config.setting import ConfigError

DTYPE_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}

QUANTIZED_BITS: Final = {
    "fp8": 8,
    "compressed-tensors": 8,
    "gptq": 4,
    "awq": 4,
    "mxfp4": 4,
    "bitsandbytes": 4,
}
"""Bits per weight where `quantization_config` does not say: by `quant_method`."""


class ModelSize(NamedTuple):
    """`weight_bytes` are of all parameters; `active` parameters work on a token (fewer than all in a mixture of experts), with `active_bytes`.

    `kv_bytes` per token, of `kv_heads` heads that tensor parallelism can divide; 1 for latent attention, which it cannot.
    """

    name: str
    weight_bytes: float
    active: float
    active_bytes: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: float


class _Config(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    quantization_config: dict[str, Any] | None = None


def model_size(model: str, kv_value_bytes: float) -> ModelSize:
    """The size of the model in a folder, or of a config.json. Raises `ConfigError` for one that is not understood."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        document = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        # Models with images keep their text part apart.
        outer = {
            name: document[name]
            for name in ("torch_dtype", "dtype", "tie_word_embeddings")
            if name in document
        }
        config = msgspec.convert(outer | document.get("text_config", document), _Config)
    except OSError as error:
        raise ConfigError(
            f"--model {model}: {file}: {error.strerror}: give a model's folder, or its config.json"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--model {model}: {file}: {error}: is it the configuration of a language model?"
        ) from error
    quantization = document.get("quantization_config") or config.quantization_config
    value_bytes = _value_bytes(config, quantization)
    total, active = _parameters(config)
    on_disk = sum(one.stat().st_size for one in path.glob("*.safetensors")) if path.is_dir() else 0
    kv_heads, width = _kv(config)
    return ModelSize(
        path.name if path.is_dir() else path.absolute().parent.name,
        float(on_disk or total * value_bytes),
        active,
        active * (on_disk / total if on_disk else value_bytes),
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        kv_heads,
        config.head_dim or config.hidden_size // config.num_attention_heads,
        config.num_hidden_layers * width * kv_value_bytes,
    )


def _value_bytes(config: _Config, quantization: dict[str, Any] | None) -> float:
    if quantization:
        method = str(quantization.get("quant_method", ""))
        return float(quantization.get("bits") or QUANTIZED_BITS.get(method, 16)) / 8
    return DTYPE_BYTES.get(config.dtype or config.torch_dtype or "", 2.0)


def _kv(config: _Config) -> tuple[int, int]:
    """KV heads, and values per token and layer."""
    if config.kv_lora_rank:
        return 1, config.kv_lora_rank + config.qk_rope_head_dim
    heads = config.num_key_value_heads or config.num_attention_heads
    return heads, 2 * heads * (config.head_dim or config.hidden_size // config.num_attention_heads)


def _parameters(config: _Config) -> tuple[float, float]:
    """All parameters, and those that work on a token: attention, feed-forward layers with three matrices, and embeddings."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    attention = config.hidden_size * head_dim * 2 * (config.num_attention_heads + kv_heads)
    experts = config.num_experts or config.num_local_experts or config.n_routed_experts or 0
    dense = 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size
    outside = embeddings * (1 if config.tie_word_embeddings else 2)
    layers = config.num_hidden_layers
    if not experts:
        inside = layers * (attention + dense)
        return inside + outside, inside + embeddings
    one = 3 * config.hidden_size * (config.moe_intermediate_size or config.intermediate_size)
    shared, chosen = config.n_shared_experts or 0, config.num_experts_per_tok or 1
    sparse = layers - config.first_k_dense_replace
    fixed = layers * attention + config.first_k_dense_replace * dense
    return (
        fixed + sparse * one * (experts + shared) + outside,
        fixed + sparse * one * (chosen + shared) + embeddings,
    )
