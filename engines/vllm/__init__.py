"""vLLM behind the `Engine` protocol. Only this package imports `vllm`, and only when an engine starts."""

from headwater.engines.vllm.adapter import VllmEngine, VllmSettings

__all__ = ["VllmEngine", "VllmSettings"]
