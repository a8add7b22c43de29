"""Capabilities of a started vLLM, from its actual configuration."""

from collections.abc import Mapping
from typing import Any, Final, get_args

from headwater.engines.vllm.config.connectors import can_hand_over
from headwater.engines.vllm.config.pooling import POOLING
from headwater.schemas.tables.capability import Capability

GENERATES: frozenset[Capability] = frozenset(
    {"generate", "logprobs", "prompt_logprobs", "allowed_tokens", "seed", "cache_salt"}
)

POSSIBLE: Final[frozenset[Capability]] = frozenset(get_args(Capability))
"""What it has depends on its arguments: no capability is out of reach."""


def capabilities(
    config: Any, tasks: tuple[str, ...], processors: Mapping[str, str], engine: Any
) -> frozenset[Capability]:
    """Capabilities of an AsyncLLM `engine` with this VllmConfig and these supported tasks."""
    found: set[Capability] = set()
    if "generate" in tasks:
        found |= GENERATES
        # With speculative decoding vLLM ignores biases and logits processors.
        if getattr(config, "speculative_config", None) is None:
            found.add("logit_bias")
            if processors:
                found.add("processors")
        # A grammar is compiled for the tokenizer's vocabulary.
        if not getattr(config.model_config, "skip_tokenizer_init", False):
            found |= {"guide", "bad_words"}
        if getattr(getattr(config, "reasoning_config", None), "enabled", False):
            found.add("thinking_budget")
        if can_hand_over(config):
            found.add("handoff")
    if "transcription" in tasks and config.model_config.hf_config.model_type == "whisper":
        found |= {"transcription", "logprobs", "allowed_tokens", "seed", "cache_salt"}
    if any(task in POOLING for task in tasks):
        found |= {"embed", "cache_salt"}
    events = config.kv_events_config
    if config.cache_config.enable_prefix_caching and events and events.enable_kv_cache_events:
        found |= {"kv_events", "kv_dump", "clear_kv"}
    if config.scheduler_config.policy == "priority":
        found.add("priority")
    if config.lora_config is not None:
        found.add("lora")
    if config.model_config.enable_sleep_mode:
        found.add("sleep")
    if hasattr(engine, "pause_generation"):
        found.add("pause")
    if _profiles(config):
        found.add("profile")
    return frozenset(found)


def _profiles(config: Any) -> bool:
    profiler = getattr(config, "profiler_config", None)
    return bool(profiler and profiler.profiler)
