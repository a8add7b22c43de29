"""The simulated engine: a paged KV cache, a scheduler and a step-time model without a GPU."""
