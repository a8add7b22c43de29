"""SGLang behind the `Engine` protocol. Only this package imports `sglang`, and only when an engine starts."""

from typing import TYPE_CHECKING, Any

from headwater.engines.traits import EngineEnvironment, EngineTraits

if TYPE_CHECKING:
    from headwater.engines.sglang.config import SglangSettings
    from headwater.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine", "SglangSettings"]

TRAITS = EngineTraits(
    loads="weights",
    has_encoder=True,
    writes_metric_files=True,
    options="sglang",
    shared_arguments={
        "model": ("model_path", "model"),
        "model_revision": ("revision",),
        "served_model_name": ("served_model_name",),
        "chat_template": ("chat_template",),
    },
    kept_back=("model_path", "model", "revision", "served_model_name", "chat_template"),
    environment=EngineEnvironment("SGLang", "sglang", "sglang", "9.5 GB"),
)


def __getattr__(name: str) -> Any:
    """Import the engine on first access: the command line reads settings without it."""
    from importlib import import_module

    if name in __all__:
        module = "engine" if name == "SglangEngine" else "config"
        return getattr(import_module(f"headwater.engines.sglang.{module}"), name)
    raise AttributeError(name)
