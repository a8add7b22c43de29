"""Checks across the settings of engines: vLLM's own arguments, and options of an engine that is not used."""

from typing import Any, TypeVar

from headwater.engines.vllm.config import cli_arguments
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.processes import EngineProcess, LocalFleetSettings
from headwater.ops.config.tree import settings_below, value_at

HasEngine = TypeVar("HasEngine", EngineProcess, LocalFleetSettings)

SHARED = ("model", "served_model_name", "chat_template")
"""Settings that vLLM has too, under the same names."""

OPTIONS_OF = {"vllm": "vllm", "sim": "sim"}
"""The section of each engine's own options."""


def checked(settings: HasEngine) -> HasEngine:
    """The settings with what vLLM's own arguments say of ours. Raises `ConfigError` for a contradiction."""
    worker, words = settings.worker, settings.vllm.native
    for name in SHARED:
        theirs, ours = cli_arguments.value(words, name), getattr(worker, name)
        if ours and theirs and ours != theirs:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {ours} contradicts {flag} {theirs} among the engine's own arguments: leave one out"
            )
        if theirs:
            shared: dict[str, Any] = {name: theirs}
            worker = worker._replace(**shared)
    # vLLM's HTTP server has a chat template; its engine has none.
    native = cli_arguments.without(words, "chat_template", takes_value=True)
    found = settings._replace(worker=worker, vllm=settings.vllm._replace(native=native))
    _check_unused(found)
    return found


def _check_unused(settings: HasEngine) -> None:
    for engine, section in OPTIONS_OF.items():
        if engine == settings.worker.engine:
            continue
        for one in settings_below(section):
            if value_at(settings, one.path) != one.default:
                what = "engine arguments (after `--`)" if one.key == "vllm.native" else one.flag
                raise ConfigError(
                    f"{what} [{one.variable}] is not used by --engine {settings.worker.engine}: leave it out"
                )
