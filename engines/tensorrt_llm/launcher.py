"""How workers of TensorRT-LLM are planned, checked and made: see `EngineLauncher`."""

import importlib.util
import os
from collections.abc import Sequence

from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.launcher import EngineLauncher, EngineSettings, WorkerSpec, visible_gpus
from headwater.engines.model_files import ModelFiles
from headwater.engines.tensorrt_llm import TensorRtOptions, config
from headwater.engines.tensorrt_llm.config import arguments, gpus_needed
from headwater.engines.tensorrt_llm.polling import not_installed
from headwater.schemas.clock import SystemClock


class TensorRtLauncher(EngineLauncher[TensorRtOptions]):
    """See `EngineLauncher`."""

    releases = config.RELEASES

    def gpus(self) -> int:
        """See `EngineLauncher.gpus`."""
        return gpus_needed(arguments(EngineSettings(WorkerSpec(""), self.options)))

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """See `EngineLauncher.check`."""
        super().check(workers)
        for worker in workers:
            settings = EngineSettings(worker, self.options)
            config.check(settings, arguments(settings))
        if importlib.util.find_spec("tensorrt_llm") is None:
            raise EngineUnavailable(not_installed("No module named 'tensorrt_llm'"))

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        from headwater.engines.tensorrt_llm.engine import TensorRtEngine

        settings = EngineSettings(worker, self.options, files)
        return TensorRtEngine(settings, SystemClock(), gpus=len(visible_gpus(os.environ)))
