"""LoRA adapters of a worker: registry, slots, load and unload."""
