"""The simulated engine: a paged KV cache, a scheduler and a step-time model without a GPU."""

from headwater.engines.traits import EngineTraits

TRAITS = EngineTraits(has_encoder=True, takes_embeddings=True, options="sim")
