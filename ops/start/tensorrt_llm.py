"""TensorRT-LLM from settings: its arguments, checked before a worker is started, and the GPUs that they need."""

import importlib.util

from headwater.engines.engine import EngineUnavailable
from headwater.engines.tensorrt_llm import config
from headwater.engines.tensorrt_llm import config as tensorrt_llm_config
from headwater.engines.tensorrt_llm.config import arguments, gpus_needed
from headwater.engines.tensorrt_llm.polling import not_installed
from headwater.engines.tensorrt_llm.settings import TensorRtSettings
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.trace import engine_traces
from headwater.schemas.events.fleet import Role


def settings_of(settings: EngineProcess, worker: str) -> TensorRtSettings:
    """The settings of its adapter, as far as the model's files do not say."""
    own, options = settings.worker, settings.engines.tensorrt_llm
    return TensorRtSettings(
        own.model,
        "",
        worker,
        role=own.role,
        block_size=own.block_size,
        max_model_len=own.max_model_len,
        file=options.file,
        overrides=options.overrides,
        handoff=options.handoff,
        processors=options.logits_processors,
        allow_faults=options.allow_faults,
        traces=engine_traces(settings.trace),
    )


def check(settings: EngineProcess, role: Role) -> None:
    """The checks of one worker's arguments, and whether it is installed. Raises `EngineUnavailable`."""
    tensorrt_llm_config.check_version(
        tensorrt_llm_config.installed(), allow=settings.engines.tensorrt_llm.allow_vulnerable_engine
    )
    own = settings_of(settings, "")._replace(role=role)
    config.check(own, arguments(own))
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise EngineUnavailable(not_installed("No module named 'tensorrt_llm'"))


def gpus(settings: EngineProcess) -> int:
    """GPUs of one worker. Raises `EngineUnavailable`."""
    return gpus_needed(arguments(settings_of(settings, "")))
