"""The metrics port of a process: Prometheus metrics (ours, and those that an engine's processes left in their folder) and probes.

The event loop hands over a copy of its state every `BEAT_S`. That shows two things: what the state is, and that the loop
runs. A copy that is too old means that the loop does not run.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from headwater.engines import registry, traits
from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.start import metrics_folder
from headwater.ops.start.sockets import family_of
from headwater.schemas.names import host_port

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

BEAT_S: Final = 0.25

HEALTH_STALE_S: Final = 3.0
"""/health fails when the event loop has not run for this long: requests sent here would wait."""

Health = Callable[[], tuple[bool, dict[str, Any]]]
"""Returns whether clients should be sent here, and what /health says about it."""


class Beat(NamedTuple):
    """State of the event loop at a time of the monotonic clock."""

    at_s: float
    healthy: bool
    body: bytes


class ProbeBoard:
    """The state that the event loop writes and the thread of the probes reads: one reference, replaced as a whole.

    `live_timeout_s`: /live fails when the loop has not run for so long, so that an orchestrator restarts the process.
    """

    def __init__(self, live_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._live_timeout_s = live_timeout_s
        self._clock = clock
        self._beat = Beat(clock(), False, msgspec.json.encode({"status": "starting"}))

    def beat(self, health: Health | None) -> None:
        """The event loop runs, and this is its state; None while no actor runs."""
        healthy, document = health() if health is not None else (False, {"status": "restarting"})
        self._beat = Beat(self._clock(), healthy, msgspec.json.encode(document))

    def live(self) -> tuple[int, bytes]:
        """Status and body of /live: whether the event loop runs."""
        silent_s = self._clock() - self._beat.at_s
        if silent_s > self._live_timeout_s:
            return 503, _stuck(silent_s)
        return 200, msgspec.json.encode({"status": "live"})

    def health(self) -> tuple[int, bytes]:
        """Status and body of /health: whether clients should be sent here."""
        beat = self._beat
        silent_s = self._clock() - beat.at_s
        if silent_s > HEALTH_STALE_S:
            return 503, _stuck(silent_s)
        return 200 if beat.healthy else 503, beat.body

    async def keep_beating(self, health: Callable[[], Health | None]) -> None:
        """Beat until cancelled; `health` returns what to ask now."""
        while True:
            self.beat(health())
            await asyncio.sleep(BEAT_S)


def _stuck(silent_s: float) -> bytes:
    return msgspec.json.encode({"status": "event loop does not run", "silent_s": round(silent_s, 1)})


# The port.

Labels = Callable[[], Mapping[str, str]]

KINDS: Final = ("edge", "router", "worker", "shadow", "tracer", "picker")
"""Actors whose metrics are named after their kind."""


def serve(
    settings: MetricsSettings,
    labels: Labels | None = None,
    more: Collector | None = None,
    board: ProbeBoard | None = None,
    *,
    kind: str = "",
) -> int:
    """Serve the metrics of an actor of this `kind` from threads, every sample with these labels, and what `more` collects; and
    `board`'s probes.

    Returns the port. Raises `ConfigError` if it is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Labelled(labels or dict, more, kind))
    app = with_probes(prometheus_client.make_wsgi_app(registry), board)
    try:
        family, host = family_of(settings.host)
        server_class = _Server6 if family == socket.AF_INET6 else _Server
        server = make_server(host, settings.port, app, server_class, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port: cannot listen on {host_port(settings.host, settings.port)}: {error.strerror or error}. "
            "Choose another one, or 0 for none"
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


def with_probes(metrics: "WSGIApplication", board: ProbeBoard | None) -> "WSGIApplication":
    """The application of the metrics port: /live and /health are the board's, everything else the metrics."""

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if board is None or path not in ("/live", "/health"):
            return metrics(environ, start_response)
        status, body = board.live() if path == "/live" else board.health()
        line = "200 OK" if status == 200 else "503 Service Unavailable"
        start_response(line, [("content-type", "application/json"), ("content-length", str(len(body)))])
        return [body]

    return app


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, so that one that sends nothing delays no other."""

    daemon_threads = True
    request_queue_size = 128


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class Labelled(Collector):
    """All metrics, with more labels.

    `rank` is the engine's own label for its data-parallel rank (see `EngineTraits.rank_label`) under the name that it has here. Metrics of another kind of actor than `kind`, which a process has only because it imports their module, are left out: they
    would be zeros that `count()` and `avg()` count.
    """

    def __init__(self, labels: Labels, more: Collector | None = None, kind: str = "") -> None:
        self._labels = labels
        self._more = more
        self._others = tuple(f"headwater_{other}_" for other in KINDS if kind and other != kind)

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        labels = self._labels()
        named = common_names()
        engine_families = []
        for family in self._collect(labels):
            yield family
            if family.name in named and family.samples:
                engine_families.append(family)
        yield from common_families(engine_families, named)
        yield from zero_counters({family.name for family in engine_families}, labels)

    def _collect(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        for family in [*_families(), *(self._more.collect() if self._more is not None else ())]:
            if family.name.startswith(self._others):
                continue
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            for sample in family.samples:
                sample_labels = dict(sample.labels)
                for engine_traits in registry.all_traits().values():
                    if rank := sample_labels.get(engine_traits.rank_label):
                        sample_labels["rank"] = rank
                # A sample's own label is the nearer one.
                labelled.samples.append(sample._replace(labels={**labels, **sample_labels}))
            yield labelled


# Metrics of engines under their common names.

KEPT: Final = ("worker", "pool", "role", "rank", "le")
"""Labels of the common metrics; what differs in others is added up."""


@cache
def _tables() -> tuple[Mapping[str, str], ...]:
    return tuple(traits.metrics for traits in registry.all_traits().values())


@cache
def common_names() -> Mapping[str, str]:
    """The common name of each metric of an engine that has one."""
    return {
        native_name: traits.PREFIX + common for table in _tables() for native_name, common in table.items()
    }


def common_families(families: Iterable[Metric], names: Mapping[str, str]) -> Iterator[Metric]:
    """These counters and histograms of engines under their common names, with the labels that all engines' have."""
    help_of = {traits.PREFIX + metric.name: metric.help for metric in traits.COMMON_METRICS}
    for family in families:
        name = names[family.name]
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix != "_created":
                key = suffix, tuple((label, sample.labels[label]) for label in KEPT if label in sample.labels)
                sums[key] = sums.get(key, 0.0) + sample.value
        common = Metric(name, help_of[name], family.type)
        for (suffix, labels), value in sums.items():
            common.add_sample(name + suffix, dict(labels), value)
        yield common


def zero_counters(exported: Collection[str], labels: Mapping[str, str]) -> Iterator[Metric]:
    """The common counters that the engine whose metrics were `exported` has not counted yet: some engines show none before their first count."""
    kept_labels = {label: value for label, value in labels.items() if label in KEPT}
    for table in _tables():
        if not table.keys() & exported:
            continue
        missing = {common for native_name, common in table.items() if native_name not in exported}
        for metric in traits.COMMON_METRICS:
            if metric.kind == "counter" and metric.name in missing:
                counter = CounterMetricFamily(
                    traits.PREFIX + metric.name, metric.help, labels=list(kept_labels)
                )
                counter.add_metric(list(kept_labels.values()), 0.0)
                yield counter


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
