"""TensorRT-LLM's configuration: its arguments, what follows from them, the known releases, and the part of its API that is called.

Arguments come in layers. A later layer replaces values of an earlier one, key by key in nested tables. An unknown key is an error with the
nearest known one; TensorRT-LLM itself would report it only when the model is loaded.

Numbers of issues in errors are those of TensorRT-LLM's repository.

The API is recorded from its API-stability references (1.2 to 1.3),
https://github.com/NVIDIA/TensorRT-LLM/tree/main/tests/unittest/api_stability. The double of the tests is generated from
these tables, and an argument that an installed release does not have is left out, with a warning.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
import yaml

from headwater.engines.engine import EngineUnavailable
from headwater.engines.launcher import EngineSettings, Releases, Vulnerability
from headwater.engines.tensorrt_llm import TensorRtOptions

LLM_ARGUMENTS: Final = frozenset(
    [
        "model",
        "tokenizer",
        "tokenizer_mode",
        "skip_tokenizer_init",
        "trust_remote_code",
        "tensor_parallel_size",
        "dtype",
        "revision",
        "tokenizer_revision",
        "pipeline_parallel_size",
        "context_parallel_size",
        "moe_tensor_parallel_size",
        "moe_expert_parallel_size",
        "enable_lora",
        "lora_config",
        "batched_logits_processor",
        "guided_decoding_backend",
        "speculative_config",
        "max_batch_size",
        "max_input_len",
        "max_seq_len",
        "max_beam_width",
        "max_num_tokens",
        "load_format",
        "enable_chunked_prefill",
        "kv_cache_config",
        "stream_interval",
        "gpus_per_node",
        "moe_cluster_parallel_size",
        "enable_attention_dp",
        "cp_config",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
        "return_perf_metrics",
        "peft_cache_config",
        "scheduler_config",
        "cache_transceiver_config",
        "gather_generation_logits",
        "num_postprocess_workers",
        "postprocess_tokenizer_dir",
        "reasoning_parser",
        "fail_fast_on_attention_window_too_large",
        "garbage_collection_gen0_threshold",
        "backend",
        "build_config",
        "cuda_graph_config",
        "attention_dp_config",
        "checkpoint_loader",
        "checkpoint_format",
        "mm_encoder_only",
        "disable_overlap_scheduler",
        "moe_config",
        "attn_backend",
        "sampler_type",
        "enable_iter_perf_stats",
        "enable_iter_req_stats",
        "batch_wait_timeout_ms",
        "batch_wait_timeout_iters",
        "batch_wait_max_tokens_ratio",
        "print_iter_log",
        "perf_metrics_max_requests",
        "torch_compile_config",
        "enable_autotuner",
        "enable_layerwise_nvtx_marker",
        "enable_min_latency",
        "force_dynamic_quantization",
        "allreduce_strategy",
        "decoding_config",
        "kv_connector_config",
        "enable_lm_head_tp_in_adp",
        "orchestrator_type",
        "otlp_traces_endpoint",
        "sparse_attention_config",
        "ray_worker_extension_cls",
    ]
)
"""Arguments of `LLM`."""

NESTED_ARGUMENTS: Final[dict[str, frozenset[str]]] = {
    "kv_cache_config": frozenset(
        [
            "enable_block_reuse",
            "max_tokens",
            "max_attention_window",
            "sink_token_length",
            "free_gpu_memory_fraction",
            "host_cache_size",
            "disk_cache_size",
            "disk_cache_path",
            "onboard_blocks",
            "cross_kv_cache_fraction",
            "secondary_offload_min_priority",
            "event_buffer_max_size",
            "attention_dp_events_gather_period_ms",
            "enable_partial_reuse",
            "copy_on_partial_reuse",
            "use_uvm",
            "dtype",
            "mamba_ssm_cache_dtype",
            "tokens_per_block",
            "use_kv_cache_manager_v2",
            "max_gpu_total_bytes",
        ]
    ),
    "cache_transceiver_config": frozenset(
        [
            "backend",
            "transceiver_runtime",
            "max_tokens_in_buffer",
            "kv_transfer_timeout_ms",
            "kv_transfer_sender_future_timeout_ms",
            "kv_transfer_poll_interval_ms",
            "kv_cache_bounce_size_mb",
            "enable_pipelined_transfer",
        ]
    ),
}
"""Arguments of those objects that the adapter reads or sets."""

GENERATE_ASYNC: Final = (
    "inputs",
    "sampling_params",
    "lora_request",
    "prompt_adapter_request",
    "streaming",
    "kv_cache_retention_config",
    "disaggregated_params",
    "trace_headers",
    "scheduling_params",
    "conversation_params",
    "cache_salt",
    "priority",
)
"""Arguments of `LLM.generate_async`; from `trace_headers` on, of newer releases."""

PROMPT_INPUTS: Final = frozenset(
    ["prompt_token_ids", "prompt", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "query"]
)
"""Keys of a prompt of token ids (`TokensPrompt`)."""

INPUT_PROCESSOR: Final = (
    "get_num_tokens_per_image",
    "get_text_with_mm_placeholders",
    "expand_prompt_token_ids_for_mm",
)
"""Methods of an `LLM`'s `input_processor` that takes images with prompts of token ids; not every model's, nor every release's has the last two."""

SAMPLING_PARAMS: Final = frozenset(
    [
        "n",
        "best_of",
        "use_beam_search",
        "max_tokens",
        "min_tokens",
        "end_id",
        "pad_id",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "bad",
        "bad_token_ids",
        "logits_processor",
        "guided_decoding",
        "embedding_bias",
        "ignore_eos",
        "detokenize",
        "add_special_tokens",
        "skip_special_tokens",
        "logprobs",
        "prompt_logprobs",
        "return_context_logits",
        "return_generation_logits",
        "exclude_input_from_output",
        "return_perf_metrics",
    ]
)
"""Arguments of `SamplingParams`."""

GUIDED_DECODING_PARAMS: Final = frozenset({"json", "regex", "grammar", "json_object", "structural_tag"})

DISAGGREGATED_PARAMS: Final = (
    "request_type",
    "first_gen_tokens",
    "first_gen_log_probs",
    "first_gen_logits",
    "ctx_request_id",
    "opaque_state",
    "draft_tokens",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style",
)
"""Fields of `DisaggregatedParams` for text."""

SCHEDULING_PARAMS: Final = ("attention_dp_rank", "attention_dp_relax")
LORA_REQUEST: Final = ("lora_name", "lora_int_id", "lora_path")

PYTHONS: Final = ("3.10", "3.12")
"""Python versions that it has wheels for. Headwater runs on the second."""

_log = structlog.get_logger("headwater.tensorrt_llm")


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that an installed release takes; each other one is logged and left out."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    for name in sorted(arguments.keys() - parameters.keys()):
        _log.warning("engine_argument_unknown", argument=name, function=function.__qualname__)
    return {name: value for name, value in arguments.items() if name in parameters}


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Does an installed release have this argument?"""
    return argument in inspect.signature(function).parameters


EVENT_BUFFER: Final = 16_384
"""KV events that are kept until they are polled: at 5 ms between polls, of far more blocks than a step stores."""

BLOCK_SIZE: Final = 32
"""TensorRT-LLM's own default of tokens per block."""

TRANSFER_TIMEOUT_MS: Final = 60_000


TensorRtSettings = EngineSettings[TensorRtOptions]


def arguments(settings: TensorRtSettings) -> dict[str, Any]:
    """The arguments of all layers. Raises `EngineUnavailable` for an unknown key or a contradiction."""
    worker, options = settings.worker, settings.options
    file = _read(options.file) if options.file else {}
    _check_known(file, options.file)
    _check_known(options.overrides, "--tensorrt-llm-overrides")
    for key in _collisions(file, options.overrides):
        _log.info("engine_argument_overridden", argument=key, file=options.file)
    merged = merge(merge(_defaults(settings), file), options.overrides)
    _set_own(merged, "model", worker.model)
    if worker.max_model_len:
        _set_own(merged, "max_seq_len", worker.max_model_len)
    if worker.block_size:
        _set_own(merged["kv_cache_config"], "tokens_per_block", worker.block_size)
    return merged


def _defaults(settings: TensorRtSettings) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "backend": "pytorch",
        # Tokens in, tokens out: only guided decoding needs a tokenizer.
        "skip_tokenizer_init": True,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
        "kv_cache_config": {
            "enable_block_reuse": True,
            # With a logits processor the events freeze the engine (TensorRT-LLM 3857): see `checks`.
            "event_buffer_max_size": 0 if settings.options.logits_processors else EVENT_BUFFER,
            "tokens_per_block": BLOCK_SIZE,
        },
    }
    if endpoint := settings.worker.traces.announced("tensorrt_llm", settings.worker.name).endpoint:
        defaults["otlp_traces_endpoint"] = endpoint
    if settings.worker.role != "both":
        defaults["cache_transceiver_config"] = {
            "backend": "DEFAULT",
            "kv_transfer_timeout_ms": TRANSFER_TIMEOUT_MS,
        }
    return defaults


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables; where both have a value that of `above`, and nested tables merged likewise."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        is_nested = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(under, value) if is_nested else value  # type: ignore[arg-type]  # not narrowed by `is_nested`
    return merged


def _read(path: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, yaml.YAMLError) as error:
        raise EngineUnavailable(f"--tensorrt-llm-file {path}: {error}") from error
    if not isinstance(document, dict):
        raise EngineUnavailable(f"--tensorrt-llm-file {path}: it is no table of arguments")
    return document


def _check_known(engine_arguments: Mapping[str, Any], where: str) -> None:
    for key, value in engine_arguments.items():
        _check_key(key, LLM_ARGUMENTS, "", where)
        if key in NESTED_ARGUMENTS and isinstance(value, Mapping):
            for inner in value:
                _check_key(inner, NESTED_ARGUMENTS[key], f"{key}.", where)


def _check_key(key: str, argument_names: frozenset[str], prefix: str, where: str) -> None:
    if key not in argument_names:
        near = difflib.get_close_matches(str(key), argument_names, n=1)
        hint = f"did you mean {prefix}{near[0]}?" if near else "see the documentation of its LLM class"
        raise EngineUnavailable(f"{where}: TensorRT-LLM has no argument {prefix}{key}: {hint}")


def _collisions(file: Mapping[str, Any], above: Mapping[str, Any], prefix: str = "") -> list[str]:
    collisions: list[str] = []
    for key, value in above.items():
        if key not in file or file[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(file[key], Mapping):
            collisions += _collisions(file[key], value, f"{prefix}{key}.")
        else:
            collisions.append(f"{prefix}{key}")
    return collisions


def _set_own(arguments: dict[str, Any], key: str, value: Any) -> None:
    """A setting of ours. It may not contradict the other layers."""
    existing = arguments.get(key)
    if existing not in (None, value) and not (key == "tokens_per_block" and existing == BLOCK_SIZE):
        raise EngineUnavailable(
            f"{key} is {existing} among TensorRT-LLM's arguments, and {value} among ours: leave one out"
        )
    arguments[key] = value


def gpus_needed(arguments: Mapping[str, Any]) -> int:
    """GPUs of one engine: all parts of the model. Experts are spread over the same ones."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    product = 1
    for name in sizes:
        product *= int(arguments.get(name) or 1)
    return product


def attention_ranks(arguments: Mapping[str, Any]) -> int:
    """Attention data-parallel ranks: each has a KV cache of its own."""
    return int(arguments.get("tensor_parallel_size") or 1) if arguments.get("enable_attention_dp") else 1


# Arguments that are known to stop, hang or end TensorRT-LLM: rejected before anything is loaded.


def check(settings: TensorRtSettings, arguments: Mapping[str, Any], *, gpus: int = 0) -> None:
    """Raises `EngineUnavailable` for the first problem. `gpus`: how many are visible, 0: unknown."""
    if arguments.get("backend") != "pytorch":
        raise EngineUnavailable(
            f"backend {arguments.get('backend')!r} is not supported: only 'pytorch' is, leave it out"
        )
    if int(arguments.get("max_beam_width") or 1) > 1:
        raise EngineUnavailable("max_beam_width: beam search is not supported, leave it out")
    _check_parallel(arguments, gpus)
    if settings.worker.role != "both":
        _check_transceiver(arguments)
    if "faults" not in settings.options.allow:
        _check_faults(settings.options, arguments)


def _check_parallel(arguments: Mapping[str, Any], gpus: int) -> None:
    tensor = int(arguments.get("tensor_parallel_size") or 1)
    experts = int(arguments.get("moe_expert_parallel_size") or 0)
    expert_tensor = int(arguments.get("moe_tensor_parallel_size") or 0)
    clusters = int(arguments.get("moe_cluster_parallel_size") or 1)
    if experts and tensor % experts:
        raise EngineUnavailable(
            f"moe_expert_parallel_size {experts} does not divide tensor_parallel_size {tensor}: experts are spread "
            "over the GPUs of the tensor-parallel group"
        )
    if experts and expert_tensor and experts * expert_tensor * clusters != tensor:
        raise EngineUnavailable(
            f"moe_tensor_parallel_size {expert_tensor} × moe_expert_parallel_size {experts} × "
            f"moe_cluster_parallel_size {clusters} is not tensor_parallel_size {tensor}: leave one of them out"
        )
    needed = gpus_needed(arguments)
    if gpus and needed > gpus:
        raise EngineUnavailable(
            f"tensor, pipeline and context parallelism need {needed} GPUs, and {gpus} are visible"
        )


def _check_transceiver(arguments: Mapping[str, Any]) -> None:
    """A prompt that does not fit the transfer buffer leaves its decode leg waiting indefinitely (dynamo 4327, 5801)."""
    transceiver = arguments.get("cache_transceiver_config")
    if not isinstance(transceiver, Mapping) or not transceiver.get("backend"):
        raise EngineUnavailable(
            "a worker with a role needs cache_transceiver_config with a backend, such as DEFAULT"
        )
    longest = arguments.get("max_seq_len")
    if not longest:
        raise EngineUnavailable("a worker with a role needs max_seq_len: give --max-model-len")
    buffer = transceiver.get("max_tokens_in_buffer")
    if not buffer or int(buffer) < int(longest):
        raise EngineUnavailable(
            f"cache_transceiver_config.max_tokens_in_buffer is {buffer or 'not set'}: give at least max_seq_len "
            f"({longest}), or the decode leg of a longer prompt waits indefinitely"
        )
    timeout = transceiver.get("kv_transfer_timeout_ms")
    if not timeout:
        raise EngineUnavailable(
            "cache_transceiver_config.kv_transfer_timeout_ms is not set: without it KV that no worker fetches is kept"
        )


def _check_faults(options: TensorRtOptions, arguments: Mapping[str, Any]) -> None:
    cache = arguments.get("kv_cache_config") or {}
    if options.logits_processors and int(cache.get("event_buffer_max_size") or 0) > 0:
        raise EngineUnavailable(
            "logits processors freeze an engine that reports KV events (TensorRT-LLM 3857): set "
            "kv_cache_config.event_buffer_max_size to 0, or leave the processors out; --allow faults overrides"
        )
    if int(cache.get("host_cache_size") or 0) > 0 and arguments.get("enable_chunked_prefill"):
        raise EngineUnavailable(
            "kv_cache_config.host_cache_size with enable_chunked_prefill ends the engine with an assertion "
            "(TensorRT-LLM 13318): leave one out; --allow faults overrides"
        )


# The installed TensorRT-LLM, and releases with known vulnerabilities.

OLDEST: Final = (1, 2, 0)
"""The first release whose API this adapter was written from."""

VULNERABILITIES: Final = (
    Vulnerability(
        "CVE-2025-23254", (0, 18, 2), "unpickles what any local user sends to its executor", refused=True
    ),
)

RELEASES: Final = Releases("TensorRT-LLM", ("tensorrt-llm",), VULNERABILITIES, "--allow vulnerable", OLDEST)
