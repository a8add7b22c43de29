"""TensorRT-LLM's own Prometheus metrics (`trtllm_*`), filled as its server fills them: from iterations and ended requests.

They are in this process's registry, so the metrics port of the worker shows them with the worker's labels next to ours.
"""

import importlib
from functools import cache
from typing import Any, Final

import structlog

LABELS: Final = {"engine_type": "trtllm"}
"""Of each sample, as its server has it, with the model's name."""

_log = structlog.get_logger("headwater.tensorrt_llm")


class LibraryMetrics:
    """Its `MetricsCollector`. A release without it, and one that raises, costs the metrics and nothing else."""

    def __init__(self, model: str) -> None:
        self._collector = _collector(model)

    def take_iteration(self, stats: dict[str, Any]) -> None:
        """The statistics of one iteration. With attention data parallelism they are those of the rank that came last."""
        self._call("log_iteration_stats", stats)

    def take_result(self, result: Any) -> None:
        """A request that has ended: its times and finish reason, if the release measures them."""
        if measured := getattr(result, "metrics_dict", None):
            self._call("log_metrics_dict", measured)

    def _call(self, method: str, values: Any) -> None:
        call = getattr(self._collector, method, None)
        if call is None:
            return
        try:
            call(values)
        except Exception as error:
            _log.warning("engine_metrics_failed", method=method, reason=f"{type(error).__name__}: {error}")
            self._collector = None


@cache
def _collector(model: str) -> Any:
    """One per process: its metrics may be registered once. None without the class."""
    try:
        made = importlib.import_module("tensorrt_llm.metrics").MetricsCollector
        return made({"model_name": model, **LABELS})
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _log.warning(
            "engine_metrics_failed", method="MetricsCollector", reason=f"{type(error).__name__}: {error}"
        )
        return None
