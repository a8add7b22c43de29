"""The double's `MetricsCollector`: two of its metrics, filled as the real one's are."""

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge


@cache
def _metrics() -> tuple[Gauge, Counter]:
    labels = ("model_name", "engine_type")
    return (
        Gauge("trtllm_kv_cache_utilization", "KV cache utilization", labels),
        Counter("trtllm_request_success_total", "Requests", (*labels, "finished_reason")),
    )


class MetricsCollector:
    """See `tensorrt_llm.metrics`."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.utilization, self.success = _metrics()

    def log_iteration_stats(self, iteration_stats: dict[str, Any]) -> None:
        """Statistics of one iteration."""
        cache = iteration_stats["kvCacheStats"]
        self.utilization.labels(**self.labels).set(cache["usedNumBlocks"] / cache["maxNumBlocks"])

    def log_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        """One request."""
        self.success.labels(**self.labels, finished_reason=metrics_dict["finished_reason"]).inc()
