"""What a TensorRT-LLM of this release with these arguments can do."""

from collections.abc import Mapping
from typing import Any

from headwater.engines.tensorrt_llm.config.recorded import takes
from headwater.engines.tensorrt_llm.config.settings import TensorRtSettings
from headwater.schemas.tables.capability import Capability


def capabilities(
    settings: TensorRtSettings, arguments: Mapping[str, Any], llm: Any, *, images: bool = False
) -> frozenset[Capability]:
    """From its settings, its arguments and the signatures of the `LLM` that was made of them. `images`: the model takes some."""
    cache = arguments["kv_cache_config"]
    has_events = bool(cache.get("enable_block_reuse")) and int(cache.get("event_buffer_max_size") or 0) > 0
    has_salt = takes(llm.generate_async, "cache_salt")
    offered: dict[Capability, bool] = {
        "generate": True,
        "logprobs": True,
        "images": images,
        "seed": True,
        "kv_events": has_events,
        "kv_dump": has_events,
        "cache_salt": has_salt,
        "priority": takes(llm.generate_async, "priority"),
        "guide": bool(arguments.get("guided_decoding_backend")),
        "processors": bool(settings.processors),
        "lora": bool(arguments.get("enable_lora") and arguments.get("lora_config")),
        "handoff": bool((arguments.get("cache_transceiver_config") or {}).get("backend")),
        "sleep": hasattr(llm, "_collective_rpc"),
        "logit_bias": settings.vocabulary > 0,
        "allowed_tokens": settings.vocabulary > 0,
        # A logits processor, which an engine that reports KV events does not survive: see `checks`.
        "bad_words": bool(settings.tokenizer) and not has_events,
        # Tokens that are taken from the cache have no logits: such a request gets a salt of its own.
        "prompt_logprobs": has_salt or not cache.get("enable_block_reuse"),
    }
    return frozenset(name for name, is_there in offered.items() if is_there)
