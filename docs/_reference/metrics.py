"""Prometheus metrics, from their table, and which metrics of engines have the common names."""

from docs._reference.markdown import code, table
from headwater.actors import metrics
from headwater.engines import registry, traits

_HEAD = """
# Metrics

Each process exports `/metrics` on its metrics port (`--metrics-port`; with `up`, `prometheus-targets.json` in the data directory lists them).
[Monitoring](../guides/monitoring.md) has boards and alert rules of them.
"""
_ENGINES = """
A worker's process also exports its engine's own metrics, under their own names, with the labels worker, pool, role and rank. The counters and histograms
of this section are among them under names that all engines share, each from the engine's first count on; the gauges are read by the worker.
"""
_OWN = """
Which metric of each engine that is; "–": the engine has none.
"""
_GROUPS = {
    "edge": "Edge",
    "router": "Router",
    "worker": "Worker",
    "engine": "Engine",
    "shadow": "Shadow router",
    "tracer": "Tracer",
    "picker": "Endpoint picker",
    "": "All processes",
}


def page() -> str:
    """The whole page."""
    groups: dict[str, list[tuple[str, str, str, str, str]]] = {}
    for row in sorted(metrics.table()):
        group = row.name.split("_")[1]
        line = code(row.name), row.kind, row.unit, " ".join(map(code, row.labels)), row.help
        groups.setdefault(group if group in _GROUPS else "", []).append(line)
    heads = ("metric", "type", "unit", "labels", "meaning")
    parts = [_HEAD]
    for group, title in _GROUPS.items():
        parts.append(f"## {title}")
        if group == "engine":
            parts += [_ENGINES, table(heads, groups[group]), _OWN, _own_names()]
        else:
            parts.append(table(heads, groups[group]))
    return "\n\n".join(parts)


def _own_names() -> str:
    own = {name: traits.metrics for name, traits in registry.all_traits().items() if traits.metrics}
    rows = []
    for one in traits.COMMON_METRICS:
        suffix = "_total" if one.kind == "counter" else ""
        cells = []
        for names in own.values():
            found = [theirs for theirs, common in names.items() if common == one.name]
            cells.append(code(found[0] + suffix) if found else "–")
        rows.append((code(traits.PREFIX + one.name + suffix), *cells))
    return table(("common name", *own), rows)
