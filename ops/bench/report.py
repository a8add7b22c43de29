"""The output of a benchmark (measures with units, and their conditions), and the servers and fleets that benchmarks run on."""

import asyncio
import os
import platform
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from headwater.ops.nats.server import binary, wait_until_up, write_config
from headwater.ops.start.signals import die_with_parent
from headwater.ops.start.sockets import free_port
from headwater.ops.terminal import table


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


def chat_body(text: str, tokens: int, **fields: Any) -> bytes:
    """A chat request to the simulated model for so many tokens."""
    return msgspec.json.encode(
        {
            "model": "sim",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            **fields,
        }
    )


# Real servers for a benchmark, with temporary stores.


@asynccontextmanager
async def servers(folder: Path, count: int) -> AsyncIterator[str]:
    """`count` servers (more than one: a cluster) with their stores in `folder`; yields their comma-separated URLs."""
    ports = [free_port(0) for _ in range(count)]
    routes = [free_port(0) for _ in range(count)]
    started = []
    for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
        cluster = {
            "name": "bench",
            "listen": f"127.0.0.1:{route}",
            "routes": [f"nats://127.0.0.1:{other}" for other in routes],
        }
        started.append(
            _start(folder / f"n{number}", port, f"n{number}", {"cluster": cluster} if count > 1 else {})
        )
    try:
        await asyncio.gather(*(wait_until_up(port) for port in ports))
        yield ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)


def _start(folder: Path, port: int, name: str, settings: dict[str, object]) -> "subprocess.Popen[bytes]":
    config = write_config(folder, port, name=name, settings=settings)
    with (folder / "server.log").open("ab") as output:
        return subprocess.Popen(
            [binary(), "-c", str(config)], stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
