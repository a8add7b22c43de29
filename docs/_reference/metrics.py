"""Prometheus metrics, from their definitions."""

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from docs._reference.markdown import code, table
from headwater.actors import metrics as _definitions
from headwater.actors.worker import inflight as worker

assert _definitions

_HEAD = """
# Metrics

Each process exports `/metrics` on its metrics port (`--metrics-port`; with `up`, `prometheus-targets.json` in the data directory lists them). vLLM's own metrics are
exported next to these, labelled with worker, pool, role and rank.
"""
_GROUPS = {"router": "Router", "edge": "Edge", "worker": "Worker", "shadow": "Shadow router"}


def page() -> str:
    """The whole page."""
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for name, kind, labels, text in sorted(found()):
        group = _GROUPS.get(name.split("_")[1], "All processes")
        groups.setdefault(group, []).append((code(name), kind, " ".join(map(code, labels)), text))
    heads = ("metric", "type", "labels", "meaning")
    return "\n\n".join([_HEAD, *(f"## {group}\n\n{table(heads, rows)}" for group, rows in groups.items())])


def found() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(name as exported, type, labels, help) of each of our metrics."""
    seen = {id(metric): metric for metric in REGISTRY._names_to_collectors.values()}
    for metric in seen.values():
        if isinstance(metric, MetricWrapperBase) and metric._name.startswith("headwater_"):
            suffix = "_total" if metric._type == "counter" else ""
            yield metric._name + suffix, str(metric._type), tuple(metric._labelnames), metric._documentation
    for name, text in worker.GAUGES.values():
        yield name, "gauge", ("worker",), text
    name, text = worker.TOKENS
    yield f"{name}_total", "counter", ("worker",), text
