"""vLLM behind the `Engine` protocol. Only this package imports `vllm`, and only when an engine starts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.engines.vllm.config import VllmSettings
    from headwater.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "VllmSettings"]


def __getattr__(name: str) -> Any:
    """Import the engine on first access: the command line parses arguments without it, in a tenth of the time."""
    from importlib import import_module

    if name in __all__:
        module = "engine" if name == "VllmEngine" else "config"
        return getattr(import_module(f"headwater.engines.vllm.{module}"), name)
    raise AttributeError(name)
