"""SGLang behind the `Engine` protocol. Only this package imports `sglang`, and only when an engine starts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.engines.sglang.config import SglangSettings
    from headwater.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine", "SglangSettings"]


def __getattr__(name: str) -> Any:
    """Import the engine on first access: the command line reads settings without it."""
    from importlib import import_module

    if name in __all__:
        module = "engine" if name == "SglangEngine" else "config"
        return getattr(import_module(f"headwater.engines.sglang.{module}"), name)
    raise AttributeError(name)
