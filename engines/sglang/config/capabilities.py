"""Capabilities of a started SGLang, from its actual configuration and release."""

from collections.abc import Mapping
from typing import Any

from headwater.engines.sglang.config.signatures import Signatures
from headwater.schemas.tables.capability import Capability

POSSIBLE: frozenset[Capability] = frozenset(
    {
        "generate",
        "transcription",
        "allowed_tokens",
        "images",
        "videos",
        "audio",
        "image_embeddings",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "thinking_budget",
        "seed",
        "priority",
        "cache_salt",
        "guide",
        "processors",
        "embed",
        "lora",
        "sleep",
        "pause",
        "profile",
        "kv_events",
        "kv_dump",
        "clear_kv",
    }
)
"""What an engine can do in some configuration."""


def capabilities(
    config: Mapping[str, Any], *, generates: bool, processors: Mapping[str, str], signatures: Signatures
) -> frozenset[Capability]:
    """What an engine with these resolved arguments (by `ServerArgs`' names) can do, except media: its model decides about these.

    SGLang has no allowed tokens and no bad words.
    """
    found: set[Capability] = {"pause", "profile"}
    if generates:
        found |= {"generate", "logprobs", "prompt_logprobs"}
        # A grammar is compiled for the tokenizer's vocabulary.
        if not config.get("skip_tokenizer_init") and config.get("grammar_backend") not in (None, "none"):
            found.add("guide")
        if not config.get("speculative_algorithm"):
            found.add("logit_bias")
            if processors:
                found.add("processors")
        # Other requests are sampled without seeds.
        if config.get("enable_deterministic_inference"):
            found.add("seed")
        if config.get("enable_strict_thinking") and signatures.has("GenerateReqInput", "max_thinking_tokens"):
            found.add("thinking_budget")
        if _names_salts(signatures):
            found.add("cache_salt")
    else:
        found.add("embed")
    if not config.get("disable_radix_cache"):
        found |= {"kv_events", "kv_dump", "clear_kv"}
    if config.get("enable_priority_scheduling"):
        found.add("priority")
    # Adapters share block hashes in events that do not name them: what one stored would count for another.
    named = signatures.has("BlockStored", "lora_name")
    if config.get("enable_lora") and int(config.get("dp_size") or 1) == 1 and named:
        found.add("lora")
    if config.get("enable_memory_saver"):
        found.add("sleep")
    if config.get("disaggregation_mode") in ("prefill", "decode"):
        found |= {"handoff", "split_only"}
    return frozenset(found)


def _names_salts(signatures: Signatures) -> bool:
    return signatures.has("GenerateReqInput", "cache_salt") and signatures.has("BlockStored", "cache_salt")
