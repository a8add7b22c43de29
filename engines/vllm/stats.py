"""vLLM's statistics: the load from each step, and its Prometheus metrics only where somebody reads them."""

from collections.abc import Callable
from typing import Any

OnStats = Callable[[Any, int], None]
"""Takes the scheduler's statistics (vLLM's SchedulerStats) and the data-parallel rank, once per step."""


def stat_loggers(on_stats: OnStats, *, prometheus: bool) -> list[Any]:
    """What to give to AsyncLLM as `stat_loggers`.

    With custom loggers it collects statistics even where `disable_log_stats` is set, and then adds its Prometheus
    logger by itself, unless one of ours is one: that is how it is kept out.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

    class Load(StatLoggerBase):
        """Hands the scheduler's statistics on."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_stats(scheduler_stats, self._rank)

        def log_engine_initialized(self) -> None:
            pass

    class NoPrometheus(PrometheusStatLogger):
        """Takes the place of vLLM's: several hundred values per step that nobody reads."""

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

    return [Load] if prometheus else [Load, NoPrometheus]
