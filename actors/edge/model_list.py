"""GET /v1/models: what is served, as OpenAI lists it, with what a client must know to use it."""

from typing import Any

from headwater.actors.edge.models import Model


def listed(model: Model) -> dict[str, Any]:
    """One model's entry. `limits` are those of one worker, 0 where its card does not tell. Adapters have a `parent`."""
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "headwater",
        "root": card.name,
        "parent": model.parent or None,
        "max_model_len": card.context_length,
        "aliases": card.aliases,
        "engine": card.engine,
        "capabilities": card.capabilities,
        "pooling_tasks": card.pooling_tasks,
        "logits_processors": card.logits_processors,
        "limits": {
            "context_tokens": card.context_length,
            "running_requests": card.max_running,
            "kv_blocks": card.total_blocks,
            "block_tokens": card.block_size,
            "lora_slots": card.lora_slots,
        },
    }
