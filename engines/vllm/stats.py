"""vLLM's statistics: the load of each step, and its Prometheus metrics only where they are exported."""

from collections.abc import Callable
from typing import Any

OnStats = Callable[[Any, int], None]
"""Called with the scheduler's statistics (vLLM's SchedulerStats) and the data-parallel rank, once per step."""


def stat_loggers(on_stats: OnStats, *, prometheus: bool) -> list[Any]:
    """The `stat_loggers` for AsyncLLM.

    With custom loggers it collects statistics even where `disable_log_stats` is set, and adds its Prometheus logger
    unless one of the custom ones is a Prometheus logger; `NoPrometheus` prevents that.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """Passes the scheduler's statistics on."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_stats(scheduler_stats, self._rank)

        def log_engine_initialized(self) -> None:
            pass

    class NoPrometheus(PrometheusStatLogger):
        """Replaces vLLM's, which computes several hundred unused values per step."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_indexes = engine_indexes or [0]

        def record(self, *_: Any, **__: Any) -> None:
            pass

        def record_sleep_state(self, *_: Any, **__: Any) -> None:
            pass

        def record_admission_rejection(self, *_: Any, **__: Any) -> None:
            pass

        def log(self) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return [LoadLogger] if prometheus else [LoadLogger, NoPrometheus]
