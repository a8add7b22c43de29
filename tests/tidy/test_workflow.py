"""The forge runs what a contributor runs, with every version of Python that the package admits."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.tidy.source import ROOT

ACTIONS = {"actions/checkout", "actions/setup-python"}
"""All that runs beside our own code."""


def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    return found


def test_it_runs_on_pushes_and_pull_requests() -> None:
    on = workflow()[True]  # YAML 1.1 reads the key "on" as a truth value
    assert set(on) == {"push", "pull_request"}


def test_each_admitted_python_is_tested() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", wanted)
    assert bounds, wanted
    versions = [f"3.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]
    assert workflow()["jobs"]["test"]["strategy"]["matrix"]["python"] == versions


def test_only_listed_actions_are_used() -> None:
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"]]
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} == ACTIONS
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]


def test_the_interpreter_reaches_make(tmp_path: Path) -> None:
    """The one that the workflow chose makes the environment, not the first of the path."""
    step = workflow()["jobs"]["test"]["steps"][-1]
    assert step["env"]["PYTHON"] == "${{ steps.python.outputs.python-path }}"
    said_by = {"make": 'echo "$@"', "python3": "exit 1"}
    for name in ("make", "git", "openssl", "npm", "chromium", "promtool", "ip", "python3"):
        text = said_by.get(name, "")
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    said = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={"PATH": f"{tmp_path}:{os.defpath}", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["test", f"PYTHON={sys.executable}"]
