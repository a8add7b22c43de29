"""Prometheus metrics of a process over HTTP: ours, and those that an engine's processes left in their folder."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from headwater.ops.config.errors import ConfigError
from headwater.ops.config.process import MetricsSettings
from headwater.ops.process import metrics_folder

Labels = Callable[[], Mapping[str, str]]


def serve(settings: MetricsSettings, labels: Labels | None = None, more: Collector | None = None) -> None:
    """Serve the metrics from a thread, every sample with these labels, and what `more` collects.

    Raises `ConfigError` if the port is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Labelled(labels or dict, more))
    try:
        prometheus_client.start_http_server(settings.port, settings.host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port: cannot listen on {settings.host}:{settings.port}: {error.strerror}. "
            "Choose another one, or 0 for none"
        ) from error


class Labelled(Collector):
    """All metrics, with more labels.

    `rank` is vLLM's own label for its data-parallel rank under the name that it has here.
    """

    def __init__(self, labels: Labels, more: Collector | None = None) -> None:
        self._labels = labels
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        labels = self._labels()
        for family in [*_families(), *(self._more.collect() if self._more is not None else ())]:
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            for sample in family.samples:
                own = dict(sample.labels)
                if "engine" in own:
                    own["rank"] = own["engine"]
                # A sample's own label is the nearer one.
                labelled.samples.append(sample._replace(labels={**labels, **own}))
            yield labelled


def _families() -> Iterable[Metric]:
    folder = os.environ.get(metrics_folder.VARIABLE)
    if not folder:
        yield from prometheus_client.REGISTRY.collect()
        return
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]  # as published
    yield from registry.collect()
    # What describes this process is in no folder.
    for collector in (
        prometheus_client.PROCESS_COLLECTOR,
        prometheus_client.PLATFORM_COLLECTOR,
        prometheus_client.GC_COLLECTOR,
    ):
        yield from collector.collect()
