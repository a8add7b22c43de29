"""The names in a PromQL expression, against the table of metrics."""

import re
from typing import Final

from headwater.actors import metrics
from headwater.actors.metrics import MetricRow

PROCESS_LABELS: Final = frozenset(
    {"job", "instance", "component", "name", "worker", "pool", "role", "rank", "le"}
)
"""Labels that Prometheus or the process adds."""

_METRIC = re.compile(r"\bheadwater_[a-z_]+\b")
_BY = re.compile(r"\b(?:by|without|on|ignoring) \(([^)]*)\)")
_MATCHERS = re.compile(r"{([^}]*)}")
_MATCHER = re.compile(r"([a-z_]+)(?:=~|!~|!=|=)")


class UnknownName(ValueError):
    """An expression names a metric or a label that does not exist."""


def rows_of(expr: str) -> list[MetricRow]:
    """The rows of the metrics that an expression names, in order. Raises `UnknownName`, also for a label that none of them has."""
    known = {row.name: row for row in metrics.table()}
    found: list[MetricRow] = []
    for name in _METRIC.findall(expr):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        row = known.get(name) or known.get(base)
        if row is None or (row.kind == "histogram") == (row.name == name):
            raise UnknownName(f"there is no series {name}: {expr}")
        found.append(row)
    labels = {label for row in found for label in row.labels} | PROCESS_LABELS
    named = {one.strip() for inner in _BY.findall(expr) for one in inner.split(",")}
    named |= {label for inner in _MATCHERS.findall(expr) for label in _MATCHER.findall(inner)}
    if unknown := named - labels - {""}:
        raise UnknownName(f"no metric of this expression has the labels {', '.join(sorted(unknown))}: {expr}")
    return list(dict.fromkeys(found))
