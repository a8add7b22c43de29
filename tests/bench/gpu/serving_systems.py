"""The systems of the serving benchmark: a fleet as `headwater up` starts it, an engine alone, and an engine's own HTTP server."""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headwater.ops.start.signals import die_with_parent
from headwater.ops.start.sockets import free_port
from headwater.schemas.names import host_port
from tests.bench.gpu import bare
from tests.bench.gpu import load as gpu_load
from tests.bench.gpu.engine_arguments import ENGINES, flags
from tests.bench.gpu.load import Load, LoadResult
from tests.bench.gpu.process import BenchChild

UP_S = 400.0
LOAD_S = 500.0
STOP_S = 30.0
POLL_S = 0.2
HOST = "127.0.0.1"
CLIENTS = 4
READY = re.compile(r"ready at http://([^:/]+):(\d+)/v1 after ([\d.]+) s \(model ([^,]+),")


class System(NamedTuple):
    """A system under load: its client processes share a load. `up_s` is the duration of its start."""

    name: str
    clients: list[BenchChild]
    up_s: float

    def run_load(self, load: Load) -> LoadResult:
        """Run a load on all client processes together."""
        shares = [
            load._replace(streams=len(range(i, load.streams, len(self.clients))), seed=load.seed * 97 + i)
            for i in range(len(self.clients))
        ]
        busy = [(client, share) for client, share in zip(self.clients, shares) if share.streams]
        for client, share in busy:
            client.send(share)
        results: list[LoadResult] = [client.receive(LOAD_S) for client, _ in busy]
        return LoadResult(
            [sample for result in results for sample in result.samples],
            min(result.began_s for result in results),
            max(result.ended_s for result in results),
        )


ONE_WORKER = ("--workers", "1")


def fleet_command(
    options: argparse.Namespace, model: Path, data: Path, workers: Sequence[str] = ONE_WORKER
) -> list[str]:
    """The command that starts a fleet with `headwater up`. `workers` are the arguments for its workers."""
    up = [sys.executable, "-m", "headwater.ops.cli", "up", "--engine", options.engine, "--model", str(model)]
    up += [*workers, "--port", "0", "--nats-port", "0", "--data-dir", str(data), "--log-level", "warning"]
    return [*up, "--", *flags(ENGINES[options.engine].arguments(options))]


class FleetUnderTest:
    """`headwater up` and its clients. Starts immediately; `ready` waits."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: Path,
        folder: Path,
        *,
        name: str = "headwater",
        workers: Sequence[str] = ONE_WORKER,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._out: Path = options.out
        self.data = folder / f"data-{name}"
        self._log = options.out / f"{name}.log"
        self._clients: list[BenchChild] = []
        command = fleet_command(options, model, self.data, workers)
        environ = {**ENGINES[options.engine].environ(options), **(environ or {})}
        self._process = _started(command, environ, self._log)

    def ready(self) -> System:
        """Wait until the fleet serves. Raises RuntimeError."""
        host, port, seconds, name = self.address()
        self._clients = _http_clients(self._out, self._name, host, port, name)
        return System(self._name, self._clients, seconds)

    def address(self) -> tuple[str, int, float, str]:
        """Host, port, seconds of the start and model, when the fleet serves. Raises RuntimeError."""
        deadline = time.monotonic() + UP_S
        while time.monotonic() < deadline:
            if found := READY.search(self._log.read_text(errors="replace")):
                host, port, seconds, name = found.groups()
                return host, int(port), float(seconds), name
            if self._process.poll() is not None:
                break
            time.sleep(POLL_S)
        raise RuntimeError(f"the fleet is not up (log: {self._log})")

    def stop(self) -> None:
        """End clients and fleet."""
        _stop(self._clients, self._process)


class OwnServer:
    """An engine's own OpenAI-compatible HTTP server and its clients, the same as those of a fleet. Starts immediately; `ready` waits."""

    def __init__(
        self, options: argparse.Namespace, model: Path, _folder: Path, *, name: str = "own-server"
    ) -> None:
        self._name = name
        self._out: Path = options.out
        self._model = str(model)
        self._port = free_port(0)
        self._log = options.out / f"{name}.log"
        self._clients: list[BenchChild] = []
        self._began_s = time.monotonic()
        engine = ENGINES[options.engine]
        module, *further = engine.server
        own = {engine.model: self._model, "host": HOST, "port": self._port, **engine.arguments(options)}
        if name.endswith("-observed"):
            own |= engine.observed(f"tcp://{HOST}:{free_port(0)}")
        command = [sys.executable, "-m", module, *flags(own), *further]
        self._process = _started(command, engine.environ(options), self._log)

    def ready(self) -> System:
        """Wait until it serves. Raises RuntimeError."""
        while time.monotonic() < self._began_s + UP_S and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{host_port(HOST, self._port)}/health"),
            ):
                took_s = time.monotonic() - self._began_s
                self._clients = _http_clients(self._out, self._name, HOST, self._port, self._model)
                return System(self._name, self._clients, took_s)
            time.sleep(POLL_S)
        raise RuntimeError(f"the engine's own server is not up (log: {self._log})")

    def stop(self) -> None:
        """End clients and server."""
        _stop(self._clients, self._process)


def _started(command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **environ, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _http_clients(out: Path, name: str, host: str, port: int, model: str) -> list[BenchChild]:
    return [
        BenchChild(gpu_load.http, (host, port, model), {}, out / f"client-{name}-{number}.log")
        for number in range(CLIENTS)
    ]


def _stop(clients: Sequence[BenchChild], process: subprocess.Popen[bytes]) -> None:
    for client in clients:
        client.stop()
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Bare:
    """An engine in a process of its own, which is its own client. Starts immediately; `ready` waits."""

    def __init__(
        self, options: argparse.Namespace, model: Path, _folder: Path, *, name: str = "bare"
    ) -> None:
        self._name = name
        engine = ENGINES[options.engine]
        arguments = {engine.model: str(model), **engine.alone, **engine.arguments(options)}
        log = options.out / f"{name}.log"
        self._child = BenchChild(bare.serve, (engine.bare, arguments), engine.environ(options), log)

    def ready(self) -> System:
        """Wait until it is ready. Raises `ChildFailed`."""
        return System(self._name, [self._child], self._child.receive(UP_S))

    def stop(self) -> None:
        """End it."""
        self._child.stop()
