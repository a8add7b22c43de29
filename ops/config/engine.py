"""Checks across the settings of engines: vLLM's own arguments, and options of an engine that is not used."""

from typing import Any, TypeVar

from headwater.engines import registry
from headwater.engines.vllm.config import cli_arguments
from headwater.ops.config.errors import ConfigError
from headwater.ops.config.processes import EngineProcess, LocalFleetSettings
from headwater.ops.config.tree import setting, settings_below, value_at

HasEngine = TypeVar("HasEngine", EngineProcess, LocalFleetSettings)

SHARED = ("model", "served_model_name", "chat_template")
"""Settings that vLLM has too, under the same names."""

OPTIONS_OF = {"vllm": "vllm", "sim": "sim"}
"""The section of the options of each engine of Headwater's own; others have `worker.engine_options`."""


def checked(settings: HasEngine) -> HasEngine:
    """The settings with what vLLM's own arguments say of ours. Raises `ConfigError` for a contradiction.

    An engine's file gets its absolute path: the workers' processes may have another folder.
    """
    worker, words = settings.worker, settings.vllm.native
    entry = registry.find(worker.engine)
    if entry.is_file:
        worker = worker._replace(engine=":".join(filter(None, (entry.module, entry.attribute))))
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
    engine = settings.worker.engine
    unused = [
        one for name, section in OPTIONS_OF.items() if name != engine for one in settings_below(section)
    ]
    if engine in OPTIONS_OF:
        unused.append(setting("worker.engine_options"))
    for one in unused:
        if value_at(settings, one.path) != one.default:
            what = "engine arguments (after `--`)" if one.key == "vllm.native" else one.flag
            raise ConfigError(f"{what} [{one.variable}] is not used by --engine {engine}: leave it out")
