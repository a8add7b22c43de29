"""Settings of adapters of real libraries, as a launcher makes them of a worker and of options."""

from typing import Any, TypeVar

from headwater.engines.launcher import EngineSettings, WorkerSpec
from headwater.engines.model_files import NO_FILES, ModelFiles

OptionsT = TypeVar("OptionsT")


def engine_settings(
    options: OptionsT, model: str = "m", *, files: ModelFiles = NO_FILES, **worker: Any
) -> EngineSettings[OptionsT]:
    """Settings of the worker w0; its model is called small unless its files say otherwise."""
    spec = WorkerSpec(**{"name": "w0", "model": model, **worker})
    return EngineSettings(spec, options, files._replace(name=files.name or "small"))


def with_fields(settings: EngineSettings[OptionsT], **fields: Any) -> EngineSettings[OptionsT]:
    """The same settings with other fields of the worker, and of the options."""
    own = {name: value for name, value in fields.items() if name in WorkerSpec._fields}
    options: Any = settings.options
    rest = {name: value for name, value in fields.items() if name not in own}
    return settings._replace(worker=settings.worker._replace(**own), options=options._replace(**rest))
