"""The examples that no command block runs: configuration, containers, units, issue templates."""

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT
from tests.docs.test_names import command_sections

EXAMPLES = ROOT / "examples"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))


def _check(command: list[str]) -> None:
    """It is a command of ours, with flags that it takes."""
    name, *rest = command
    section = command_sections()[name]
    for word in rest[: rest.index("--")] if "--" in rest else rest:
        if word.startswith("--"):
            assert f"`{word}" in section, f"headwater {name} {word}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_commands_that_exist(unit: Path) -> None:
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(unit)
    program, *arguments = shlex.split(parsed["Service"]["ExecStart"])
    assert program.startswith("/opt/headwater/bin/")
    if program.endswith("/headwater"):
        _check(arguments)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_units_are_valid(tmp_path: Path) -> None:
    """With programs that exist here, since `verify` looks for them."""
    for unit in UNITS:
        name = unit.name.replace("@.", "@0.")
        (tmp_path / name).write_text(unit.read_text().replace("/opt/headwater/bin/", "/bin/true "))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.glob("*.service")))],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "headwater-" in line]
    assert not ours


def test_compose_runs_commands_that_exist() -> None:
    document = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())
    assert set(document["services"]) == {"nats", "pools", "router", "edge", "worker"}
    for service in document["services"].values():
        program, *arguments = service["command"]
        if program == "headwater":
            _check(arguments)


def test_issue_templates_are_yaml() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        assert yaml.safe_load(path.read_text())
