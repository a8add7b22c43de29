"""The output of a benchmark: measures with units, and their conditions."""

import os
import platform
from typing import Any

import msgspec

from headwater.ops.process.text_table import table


class Measure(msgspec.Struct):
    """One figure. `target` is the project's goal, empty where there is none."""

    name: str
    value: float
    unit: str
    target: str = ""


class Report(msgspec.Struct):
    """A benchmark's result."""

    benchmark: str
    conditions: dict[str, Any]
    measures: list[Measure]


def show(report: Report, *, as_json: bool) -> None:
    """Print it, for people or for programs."""
    report.conditions |= {"machine": machine()}
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    print(f"{report.benchmark}: " + ", ".join(f"{name} {value}" for name, value in report.conditions.items()))
    rows = [(m.name, f"{m.value:,.4g}", m.unit, m.target) for m in report.measures]
    print(table(("measure", "value", "unit", "target"), rows))


def machine() -> str:
    """Cores, processor and Python of this machine."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}"


def cpu_seconds(pid: int) -> float:
    """User and system seconds a process has used. Linux."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    """The quantile of the values at `share` (0 to 1)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
