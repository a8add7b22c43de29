"""The table of metrics: names after Prometheus's conventions, each set by some code, tenants counted only when asked and capped."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from headwater.actors import metrics
from headwater.actors.metrics import MetricRow, TenantMetrics

ROWS = sorted(metrics.table())
TABLE = Path(metrics.__file__)
ACTORS = TABLE.parent
TRACER = ACTORS.parent / "ops" / "tracer.py"
SET = r"\.(inc|dec|set|observe|time)\b"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_name_says_its_kind_and_unit(row: MetricRow) -> None:
    assert re.fullmatch(
        r"headwater_(edge|router|worker|engine|shadow|tracer|picker|log)_[a-z_]+[a-z]", row.name
    )
    assert row.name.endswith("_total") == (row.kind == "counter")
    assert (row.kind == "histogram") <= (row.unit == "seconds"), "a histogram of something without a unit"
    assert not re.search(r"_(ms|millis|percent|count|sum|bucket|seconds_\w+_seconds)(_|$)", row.name)
    assert row.help
    assert row.help[0].isupper()
    assert not row.help.endswith(".")


def test_no_name_is_there_twice() -> None:
    names = [row.name.removesuffix("_total") for row in ROWS]
    assert len(names) == len(set(names)) > 80


def test_no_label_can_hold_a_key_or_grow_with_the_requests() -> None:
    """What labels there are. A new one needs a bound on its values."""
    assert {label for row in ROWS for label in row.labels} == {
        *("pool", "worker", "engine", "model", "endpoint"),
        *("reason", "cause", "phase", "outcome", "status", "limit", "kind", "source", "field", "what", "of"),
        *("priority", "policy", "judge", "role", "state"),
        # Capped: see `TenantMetrics`.
        "tenant",
        # Of a traffic split, which has `SHARES_MAX` of them at most.
        "name",
    }


def _uses(name: str) -> bool:
    """Is a metric, by its name in the module, set somewhere? A private one is by a class of the module, through an attribute or in a method."""
    others = (path for path in (*ACTORS.rglob("*.py"), TRACER) if path != TABLE)
    outside = "\n".join(path.read_text() for path in others)
    if not name.startswith("_"):
        at_once = rf"metrics\.{name}(\.labels\([^)]*\)+)?{SET}"
        return re.search(rf"{at_once}|self\.\w+ = metrics\.{name}\b", outside) is not None
    for kind in ast.walk(ast.parse(TABLE.read_text())):
        if not isinstance(kind, ast.ClassDef):
            continue
        for method in kind.body:
            if not isinstance(method, ast.FunctionDef) or name not in ast.unparse(method):
                continue
            used = rf"\.{method.name}\("
            if method.name != "__init__" and re.search(used, outside):
                return True
            reached = set()
            for line in ast.walk(method):
                if isinstance(line, ast.Assign) and name in ast.unparse(line.value):
                    reached |= {target.attr for target in line.targets if isinstance(target, ast.Attribute)}
            rest = "".join(ast.unparse(other) for other in kind.body if other is not method)
            if any(
                re.search(rf"\.{attribute}{SET}", outside) or re.search(rf"self\.{attribute}\b", rest)
                for attribute in reached
            ):
                return True
    return False


def test_every_metric_is_set_by_some_code() -> None:
    defined = {name for name, value in vars(metrics).items() if isinstance(value, MetricWrapperBase)}
    assert len(defined) > 50
    assert not {name for name in defined if not _uses(name)}


def test_a_metric_that_nothing_sets_would_be_found() -> None:
    assert not _uses("_NEVER_DEFINED")
    assert not _uses("NEVER_DEFINED")


def _tenants(name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == name and sample.labels["tenant"].startswith(("unit-", "other", "unnamed")):
                found[sample.labels["tenant"]] = found.get(sample.labels["tenant"], 0.0) + sample.value
    return found


def test_tenants_are_counted_only_when_asked_and_only_so_many() -> None:
    requests = "headwater_edge_tenant_requests_total"
    before = _tenants(requests)
    silent = TenantMetrics()
    silent.ended("unit-a", "stop", 10, 5, 3)
    assert _tenants(requests) == before
    two = TenantMetrics()
    two.tenants_max = 2
    for tenant in ("unit-a", "unit-b", "unit-c", "unit-d", "unit-a", "key-0123456789abcdef", ""):
        two.ended(tenant, "stop", 10, 5, 3)
    assert _tenants(requests) == {
        "unit-a": 2,
        "unit-b": 1,
        "other": before.get("other", 0) + 2,
        "unnamed": before.get("unnamed", 0) + 2,
    }
    tokens = _tenants("headwater_edge_tenant_tokens_total")
    assert tokens["unit-a"] == 2 * 18
