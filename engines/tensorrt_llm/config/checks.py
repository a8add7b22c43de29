"""Arguments that are known to stop, hang or end TensorRT-LLM: rejected before anything is loaded.

The numbers are those of its issues.
"""

from collections.abc import Mapping
from typing import Any

from headwater.engines.engine import EngineUnavailable
from headwater.engines.tensorrt_llm.config.arguments import gpus_needed
from headwater.engines.tensorrt_llm.config.settings import TensorRtSettings


def check(settings: TensorRtSettings, arguments: Mapping[str, Any], *, gpus: int = 0) -> None:
    """Raises `EngineUnavailable` for the first problem. `gpus`: how many are visible, 0: unknown."""
    if arguments.get("backend") != "pytorch":
        raise EngineUnavailable(
            f"backend {arguments.get('backend')!r} is not supported: only 'pytorch' is, leave it out"
        )
    if int(arguments.get("max_beam_width") or 1) > 1:
        raise EngineUnavailable("max_beam_width: beam search is not supported, leave it out")
    _check_parallel(arguments, gpus)
    if settings.role != "both":
        _check_transceiver(arguments)
    if not settings.allow_faults:
        _check_faults(settings, arguments)


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


def _check_faults(settings: TensorRtSettings, arguments: Mapping[str, Any]) -> None:
    cache = arguments.get("kv_cache_config") or {}
    if settings.processors and int(cache.get("event_buffer_max_size") or 0) > 0:
        raise EngineUnavailable(
            "logits processors freeze an engine that reports KV events (TensorRT-LLM 3857): set "
            "kv_cache_config.event_buffer_max_size to 0, or leave the processors out; --tensorrt-llm-allow-faults overrides"
        )
    if int(cache.get("host_cache_size") or 0) > 0 and arguments.get("enable_chunked_prefill"):
        raise EngineUnavailable(
            "kv_cache_config.host_cache_size with enable_chunked_prefill ends the engine with an assertion "
            "(TensorRT-LLM 13318): leave one out; --tensorrt-llm-allow-faults overrides"
        )
