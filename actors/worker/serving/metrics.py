"""The metrics of a worker, computed from its statistics on each scrape."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

GAUGES: Final = {
    "running": ("headwater_worker_running_requests", "Requests running in the engine"),
    "waiting": ("headwater_worker_waiting_requests", "Requests waiting in the engine"),
    "used_blocks": ("headwater_worker_used_blocks", "KV blocks in use"),
    "total_blocks": ("headwater_worker_total_blocks", "KV blocks in total"),
    "handoffs_held": (
        "headwater_worker_held_handoffs",
        "Prefilled prompts whose KV is kept for another worker",
    ),
    "embedding_bytes_held": (
        "headwater_worker_held_embedding_bytes",
        "Bytes of image embeddings on offer to other workers, or being read",
    ),
    "kv_events_pending": ("headwater_worker_pending_kv_events", "KV events that the log has not stored yet"),
    "epoch": ("headwater_worker_epoch", "Epoch of the worker's incarnation"),
}
TOKENS: Final = ("headwater_worker_tokens", "Tokens sent to edges")

Stats = Callable[[], Mapping[str, Any]]


class WorkerCollector(Collector):
    """Collects from the workers of one process. `workers` returns the name and the statistics of each."""

    def __init__(self, workers: Callable[[], Iterable[tuple[str, Stats]]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        found = [(name, stats()) for name, stats in self._workers()]
        for field, (metric, text) in GAUGES.items():
            gauge = GaugeMetricFamily(metric, text, labels=["worker"])
            for name, stats in found:
                if field in stats:
                    gauge.add_metric([name], stats[field])
            yield gauge
        tokens = CounterMetricFamily(*TOKENS, labels=["worker"])
        for name, stats in found:
            if "tokens_total" in stats:
                tokens.add_metric([name], stats["tokens_total"])
        yield tokens
