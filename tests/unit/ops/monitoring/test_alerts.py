"""Alert rules: promtool accepts them, each fires where it should and not on a healthy fleet, and each has its page in the runbook."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs._boards.promql import UnknownName, rows_of

from headwater.ops.monitoring.files import FOLDER, RULES
from tests.docs.pages import ROOT
from tests.support.servers.prometheus import program
from tests.unit.ops.monitoring.alert_cases import AT, CASES, HEALTHY, STEP_S, Case


def rules() -> dict[str, dict[str, Any]]:
    """The rules by name."""
    groups = yaml.safe_load((FOLDER / RULES).read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool(*arguments: str) -> str:
    """What promtool prints. Fails if it does."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(FOLDER / RULES))


def _looks(case: Case) -> dict[str, Any]:
    """What promtool is to find of a case: it compares labels and all annotations."""
    rule = rules()[case.alert]
    fires = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": rule["annotations"] | {"summary": case.summary},
    }
    return {"eval_time": AT, "alertname": case.alert, "exp_alerts": [fires] if case.summary else []}


def _tests(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """The cases as tests of promtool, each of which takes as many as change different series: it takes half a second for one."""
    tests: list[tuple[dict[str, str], list[dict[str, Any]]]] = []
    for case in cases:
        fits = (one for one in tests if not one[0].keys() & case.series.keys())
        changed, looks = found = next(fits, ({}, []))
        if found not in tests:
            tests.append(found)
        changed.update(case.series)
        looks.append(_looks(case))
    return [
        {
            "interval": f"{STEP_S}s",
            "input_series": [{"series": k, "values": v} for k, v in (HEALTHY | changed).items()],
            "alert_rule_test": looks,
        }
        for changed, looks in tests
    ]


def test_each_alert_fires_where_it_should_and_only_there(tmp_path: Path) -> None:
    """On series that show its fault, and neither on a healthy fleet's nor just below its threshold or its time."""
    healthy = [Case(alert, {}) for alert in rules()]
    tests = [*_tests(healthy), *_tests(CASES)]
    assert len(tests) < 8
    document = {"rule_files": [str(FOLDER / RULES)], "evaluation_interval": f"{STEP_S}s", "tests": tests}
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(path))


def test_each_alert_has_a_case_that_fires_and_one_just_below() -> None:
    assert {case.alert for case in CASES if case.summary} == set(rules())
    assert {case.alert for case in CASES if not case.summary} == set(rules())
    assert all(set(case.series) <= set(HEALTHY) for case in CASES)


@pytest.mark.parametrize("name", rules())
def test_a_rule_says_what_it_is_about_and_why(name: str) -> None:
    rule = rules()[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    rows_of(rule["expr"])
    page = ROOT / "docs" / f"{rule['annotations']['runbook']}.md"
    assert page.stem == name
    text = page.read_text()
    assert text.startswith(f"# {name}\n")
    assert "## Why this threshold" in text
    assert "## What to do" in text
    assert {path.stem for path in page.parent.glob("*.md")} - {"index"} == set(rules())


@pytest.mark.parametrize(
    "expr",
    [
        "headwater_edge_requests",
        "rate(headwater_edge_request_seconds[5m])",
        "headwater_router_lag_seconds_bucket",
        "sum by (tenant) (rate(headwater_edge_requests_total[5m]))",
        'headwater_log_stalled_seconds{which="pool log"}',
    ],
)
def test_names_that_do_not_exist_are_found(expr: str) -> None:
    with pytest.raises(UnknownName):
        rows_of(expr)
