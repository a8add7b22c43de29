"""Layouts of workers on GPUs: which there are, what fits by the model's size, and how long a step of their engines takes.

A model's size follows from its config.json: weights, work per token, and KV cache per token. Step times are a roofline: the longer of nothing
is taken, as a step's prompts and its decoding add up in the simulator's model. A prompt's time is its arithmetic, a decode step's the reading
of weights and KV; tensor parallelism divides both and adds its all-reduces.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headwater.engines.sim import SEQUENCES_MAX, STEP_TOKENS_MAX, StepTime
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.advise_options import GpuType
from headwater.ops.whatif.setup import Setup

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
    on_disk = sum(shard.stat().st_size for shard in path.glob("*.safetensors")) if path.is_dir() else 0
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
    per_expert = 3 * config.hidden_size * (config.moe_intermediate_size or config.intermediate_size)
    shared, chosen = config.n_shared_experts or 0, config.num_experts_per_tok or 1
    sparse = layers - config.first_k_dense_replace
    fixed = layers * attention + config.first_k_dense_replace * dense
    return (
        fixed + sparse * per_expert * (experts + shared) + outside,
        fixed + sparse * per_expert * (chosen + shared) + embeddings,
    )


MEMORY_SHARE: Final = 0.9
"""Share of a GPU's memory that an engine uses, as vLLM's default."""

RESERVE_BYTES: Final = 3e9
"""Of that, for activations and CUDA graphs, per GPU."""

COMPUTE_SHARE: Final = 0.65
"""Share of the published TFLOPS that prompts reach."""

BANDWIDTH_SHARE: Final = 0.8
"""Share of the published memory bandwidth that decoding reaches."""

STEP_MS: Final = 1.1
PREFILL_MS: Final = 1.0
"""What a step, and one with prompts, takes besides. With the shares above, the times of Qwen3-8B's shape on an H200 and an H100 are those measured; see
docs/guides/tuning.md."""

REDUCE_MS: Final = 0.010
"""One all-reduce of a few kilobytes between the GPUs of a host; a layer has two."""

BLOCK_SIZE: Final = 64
"""Tokens per block of the simulation: fine enough for short prompts, and a divisor of a trace's 512."""

TENSOR_PARALLEL: Final = (1, 2, 4, 8)


class Layout(NamedTuple):
    """Workers of `tensor_parallel` GPUs each: aggregated ones, or prefill and decode workers."""

    tensor_parallel: int
    workers: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.tensor_parallel * (self.workers + self.prefill + self.decode)

    def __str__(self) -> str:
        """Return the layout in short form."""
        workers = (
            f"{self.workers} aggregated" if self.workers else f"{self.prefill} prefill + {self.decode} decode"
        )
        return f"TP {self.tensor_parallel}: {workers}"

    @property
    def flags(self) -> str:
        """The flags of `headwater up` for it."""
        roles = (
            f"--workers {self.workers}"
            if self.workers
            else f"--prefill-workers {self.prefill} --decode-workers {self.decode}"
        )
        return roles + (
            f" -- --tensor-parallel-size {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        )


class Refused(NamedTuple):
    """Layouts of this tensor parallelism are not possible, and why."""

    tensor_parallel: int
    reason: str


def layouts(
    size: ModelSize, gpu: GpuType, count: int, longest: int, *, roles: bool = True
) -> tuple[list[Layout], list[Refused]]:
    """Every layout that uses as many of `count` GPUs as its tensor parallelism allows. `longest`: tokens of the longest request."""
    fitting: list[Layout] = []
    refused: list[Refused] = []
    for parallel in TENSOR_PARALLEL:
        if parallel > count:
            break
        tokens = kv_tokens(size, gpu, parallel)
        if size.heads % parallel:
            refused.append(Refused(parallel, f"{size.heads} attention heads cannot be divided"))
        elif tokens <= 0:
            refused.append(Refused(parallel, f"weights of {size.weight_bytes / 1e9:.1f} GB do not fit"))
        elif tokens < longest:
            refused.append(
                Refused(
                    parallel,
                    f"the KV cache would hold {tokens:,} tokens, and the longest request has {longest:,}",
                )
            )
        else:
            workers = count // parallel
            fitting.append(Layout(parallel, workers))
            if roles:
                fitting += [Layout(parallel, 0, prefill, workers - prefill) for prefill in range(1, workers)]
    return fitting, refused


def kv_tokens(size: ModelSize, gpu: GpuType, parallel: int) -> int:
    """Tokens that the KV cache of a worker holds. KV heads beyond one per GPU are copies."""
    each = gpu.memory_mib * 2**20 * MEMORY_SHARE - RESERVE_BYTES - size.weight_bytes / parallel
    return int(each * min(parallel, size.kv_heads) / size.kv_bytes)


def step_time(size: ModelSize, gpu: GpuType, parallel: int, mean_tokens: float) -> StepTime:
    """The roofline of a worker. `mean_tokens` of a request tell how many requests share its KV cache.

    Milliseconds: prefill A·x² (attention) + B·x (matrices, all-reduces) + C; decode E·p (KV, and arithmetic for the tokens of the batch) + F (weights).
    """
    flops = gpu.tflops * 1e9 * COMPUTE_SHARE * parallel
    read = gpu.memory_gb_per_s * 1e6 * BANDWIDTH_SHARE * parallel
    link = gpu.link_gb_per_s * 1e6
    exchanged = 2 * size.layers * size.hidden * 2 * 2 * (parallel - 1) / parallel
    reduces = 2 * size.layers * REDUCE_MS if parallel > 1 else 0.0
    attention = 2 * size.layers * size.heads * size.head_dim / flops
    matrices = 2 * size.active / flops + exchanged / link
    capacity = kv_tokens(size, gpu, parallel)
    batch = min(SEQUENCES_MAX, capacity / mean_tokens)
    copies = max(1.0, parallel / size.kv_heads)
    full = capacity * size.kv_bytes * copies / read + 2 * size.active * batch / flops
    return StepTime(
        (attention, matrices, PREFILL_MS + reduces), (0.0, full, size.active_bytes / read + STEP_MS + reduces)
    )


def scaled(measured: StepTime, before: StepTime, after: StepTime) -> StepTime:
    """Measured step times of one tensor parallelism for another, by the ratio of their rooflines."""

    def each(
        values: tuple[float, float, float], was: tuple[float, float, float], now: tuple[float, float, float]
    ) -> tuple[float, float, float]:
        # A term that the roofline does not have is scaled as the largest one that it has.
        largest = max(range(3), key=lambda at: was[at])
        usual = now[largest] / was[largest]
        square, linear, fixed = (
            v * (n / w if w else usual) for v, w, n in zip(values, was, now, strict=True)
        )
        return square, linear, fixed

    return StepTime(
        each(measured.prefill_ms, before.prefill_ms, after.prefill_ms),
        each(measured.decode_ms, before.decode_ms, after.decode_ms),
        measured.encode_ms,
    )


def of_cache(times: StepTime, factor: float) -> StepTime:
    """The same step times, where a share of blocks is of a KV cache larger by `factor`: the same share has so many more tokens."""
    square, linear, fixed = times.decode_ms
    return StepTime(times.prefill_ms, (square * factor**2, linear * factor, fixed), times.encode_ms)


def slower(times: StepTime, prefill: float, decode: float) -> StepTime:
    """Step times by other factors, to see what an error of them does."""

    def each(values: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
        square, linear, fixed = (value * factor for value in values)
        return square, linear, fixed

    return StepTime(each(times.prefill_ms, prefill), each(times.decode_ms, decode), times.encode_ms)


def setup_of(layout: Layout, base: Setup, size: ModelSize, gpu: GpuType, times: StepTime) -> Setup:
    """The what-if of a layout."""
    return msgspec.structs.replace(
        base,
        workers=layout.workers,
        prefill_workers=layout.prefill,
        decode_workers=layout.decode,
        blocks=max(1, kv_tokens(size, gpu, layout.tensor_parallel) // base.block_size),
        step_time=times,
        step_tokens=STEP_TOKENS_MAX,
        sequences=SEQUENCES_MAX,
        kv_bytes_per_token=max(1, round(size.kv_bytes)),
    )
