"""vLLM behind the `Engine` protocol. Only this package imports `vllm`, and only when an engine starts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.engines.vllm.adapter import VllmEngine
    from headwater.engines.vllm.arguments import VllmSettings

__all__ = ["VllmEngine", "VllmSettings"]


def __getattr__(name: str) -> Any:
    """The adapter, once it is asked for: the command line reads arguments without it, in a tenth of the time."""
    from importlib import import_module

    if name in __all__:
        module = "adapter" if name == "VllmEngine" else "arguments"
        return getattr(import_module(f"headwater.engines.vllm.{module}"), name)
    raise AttributeError(name)
