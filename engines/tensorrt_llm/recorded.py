"""The part of TensorRT-LLM's API that the adapter calls, recorded from its API-stability references (1.2 to 1.3).

https://github.com/NVIDIA/TensorRT-LLM/tree/main/tests/unittest/api_stability. The double of the tests is generated from
these tables, and an argument that an installed release does not have is left out, with a warning.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import structlog

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
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return arguments
    for name in sorted(arguments.keys() - parameters.keys()):
        _log.warning("engine_argument_unknown", argument=name, function=function.__qualname__)
    return {name: value for name, value in arguments.items() if name in parameters}


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Does an installed release have this argument?"""
    return argument in inspect.signature(function).parameters
