"""How workers of TensorRT-LLM are planned, checked and made: see `EngineLauncher`."""

import importlib.util
import os
from collections.abc import Sequence
from typing import ClassVar

from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.launcher import EngineLauncher, WorkerSpec, visible_gpus
from headwater.engines.model_files import ModelFiles
from headwater.engines.releases import Vulnerability
from headwater.engines.tensorrt_llm import TensorRtOptions, config
from headwater.engines.tensorrt_llm.config import TensorRtSettings, arguments, gpus_needed
from headwater.engines.tensorrt_llm.polling import not_installed
from headwater.schemas.clock import SystemClock


class TensorRtLauncher(EngineLauncher[TensorRtOptions]):
    """See `EngineLauncher`."""

    vulnerabilities: ClassVar[Sequence[Vulnerability]] = config.VULNERABILITIES

    def gpus(self) -> int:
        """See `EngineLauncher.gpus`."""
        return gpus_needed(arguments(self._settings(WorkerSpec(""))))

    def check(self, workers: Sequence[WorkerSpec]) -> None:
        """See `EngineLauncher.check`."""
        config.check_version(config.installed(), allow=self.options.allow_vulnerable_engine)
        for worker in workers:
            settings = self._settings(worker)
            config.check(settings, arguments(settings))
        if importlib.util.find_spec("tensorrt_llm") is None:
            raise EngineUnavailable(not_installed("No module named 'tensorrt_llm'"))

    def _settings(self, worker: WorkerSpec) -> TensorRtSettings:
        """The settings of the adapter, as far as the model's files do not say."""
        options = self.options
        return TensorRtSettings(
            worker.model,
            "",
            worker.name,
            role=worker.role,
            block_size=worker.block_size,
            max_model_len=worker.max_model_len,
            file=options.file,
            overrides=options.overrides,
            handoff=options.handoff,
            processors=options.logits_processors,
            allow_faults=options.allow_faults,
            traces=worker.traces,
        )

    def make(self, worker: WorkerSpec, files: ModelFiles) -> Engine:
        """See `EngineLauncher.make`."""
        from headwater.engines.tensorrt_llm.engine import TensorRtEngine

        own = self._settings(worker)._replace(
            name=files.name,
            context_length=files.context_length,
            eos_token_ids=files.eos_token_ids,
            vocabulary=files.vocabulary,
            tokenizer=files.tokenizer,
        )
        return TensorRtEngine(own, SystemClock(), gpus=len(visible_gpus(os.environ)))
