"""Commands to a worker: drain, sleep, wake, pause, role, LoRA."""
