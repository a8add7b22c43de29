"""`headwater up`: a whole fleet as supervised processes of this machine.

    up ─┬─ nats-server      JetStream in the data folder, loopback only
        ├─ router
        ├─ edge
        ├─ admin            only with --admin-port
        └─ engine host (vLLM on CPU: one process that imports, then forks the workers)
           or one process per worker

Stops in the order in which nobody is left waiting: edge, workers, router, server.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headwater.actors.supervisor import GaveUp, RestartPolicy, supervise
from headwater.events.clock import SystemClock
from headwater.events.errors import LogError
from headwater.events.jetstream import Connection, JetStreamTable, connect, ensure_namespace, without_secret
from headwater.ops import (
    admin,
    data_dir,
    engines,
    nats_server,
    preflight,
    queue_settings,
    worker_flags,
    workers,
)
from headwater.ops.access import credentials
from headwater.ops.bury import bury
from headwater.ops.children import Child, headwater_command
from headwater.ops.config import CLIENTS, ENV_PREFIX, HTTP, NATS, QUEUE, ROUTING, ConfigError, Settings
from headwater.ops.nats_watch import watch_store
from headwater.ops.pools import keep_namespace, keep_pools
from headwater.ops.run_actor import listen
from headwater.schemas import subjects

READY_POLL_S = 0.05
PROGRESS_S = 3.0

_log = structlog.get_logger("headwater.up")


BESIDE_WORKERS = ("edge-0", "router-0")
TARGETS = "prometheus-targets.json"
"""File in the data directory that lists every process's metrics, as Prometheus's file_sd_configs reads them."""


class Fleet:
    """The processes of one `headwater up`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        gpus = workers.visible_gpus(os.environ) if settings.engine == "vllm" and not engines.on_cpu() else ()
        first = settings.metrics_port or workers.free_range(
            len(workers.names(settings)) + len(BESIDE_WORKERS), settings.host
        )
        # The workers' ports first: one process may host them all, and counts them in the same way.
        settings = self._settings = msgspec.structs.replace(settings, metrics_port=first)
        self.workers = workers.plan(settings, devices=gpus)
        self._metrics_ports = {
            name: first + len(self.workers) + number for number, name in enumerate(BESIDE_WORKERS)
        }
        self._data = Path(settings.data_dir)
        self._held = contextlib.ExitStack()
        self._children: list[tuple[Child, asyncio.Task[None]]] = []
        self._leases: JetStreamTable | None = None
        self._client: Connection | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self.nats = settings.nats
        self.url = ""
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start everything; returns when each process runs, not yet when the fleet is ready."""
        settings = self._settings
        self._held.enter_context(data_dir.held(self._data))
        if settings.replicas > 1 and not self.nats:
            raise ConfigError(
                f"--replicas {settings.replicas} needs a cluster of NATS servers: give its URL with --nats"
            )
        preflight.check(settings, self.workers)
        # A default model is made here too, where its progress shows, not in a worker's log.
        engines.check_model(settings)
        if settings.admin_port:
            admin.check(settings)
        listener = listen(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        listener.close()
        self.url = f"http://{host if host != '0.0.0.0' else '127.0.0.1'}:{port}"
        self._write_targets()
        if not self.nats:
            await self._start_nats()
        client = await connect(
            self.nats,
            "up",
            inbox=subjects.inbox(settings.namespace, "operator", "up", "log"),
            credentials=credentials(settings, "operator", "up"),
        )
        self._client = client
        await ensure_namespace(client, settings.namespace, replicas=settings.replicas)
        # The actors may not create streams when they log in as what they are.
        self._keeping += [
            asyncio.create_task(keep(client, settings.namespace, settings.replicas), name="streams")
            for keep in (keep_namespace, keep_pools)
        ]
        self._leases = JetStreamTable(self._client, subjects.lease_bucket(settings.namespace))
        common = self._common()
        # Next to the log: who removes one removes the other.
        cache = settings.cache_dir or str(self._data / "cache")
        local = queue_settings.flags(settings, (*ROUTING, *QUEUE))
        local += ["--metrics-port", str(self._metrics_ports["router-0"])]
        self._add("router", [*common, "--name", "router-0", "--cache-dir", cache, *local], "router")
        if settings.admin_port:
            at = ["--admin-host", settings.admin_host, "--admin-port", str(settings.admin_port)]
            tokens = ["--admin-token-file", str(Path(settings.admin_token_file).resolve())]
            self._add("admin", [*self._plain(), *at, *tokens], "admin")
        edge = ["--name", "edge-0", "--port", str(port), "--host", str(host)]
        edge += ["--metrics-port", str(self._metrics_ports["edge-0"])]
        edge += queue_settings.flags(settings, (*CLIENTS, *HTTP))
        self._add("edge", [*common, *edge, "--record-payloads", settings.record_payloads], "edge")
        self._add_engines(common)

    def _add_engines(self, common: list[str]) -> None:
        """Start the workers: in one process that imports for all of them where that can be, else each in its own."""
        settings = self._settings
        flags = [*common, *worker_flags.common(settings)]
        behind = ["--", *settings.native] if settings.native else []
        if settings.engine == "vllm" and engines.on_cpu():
            self._add("engines", [*flags, *worker_flags.together(settings), *behind], "engine")
            return
        for worker in self.workers:
            own = worker_flags.of(worker)
            environ = {workers.DEVICES: ",".join(worker.gpus)} if worker.gpus else {}
            self._add(worker.name, [*flags, *own, *behind], "engine", lease=worker.name, environ=environ)

    def _write_targets(self) -> None:
        """Tell Prometheus where every process has its metrics. Raises `ConfigError` for a port that is taken."""
        host = self._settings.host
        ports = {
            **{("worker", worker.name): worker.metrics_port for worker in self.workers},
            **{(name.partition("-")[0], name): port for name, port in self._metrics_ports.items()},
        }
        for port in ports.values():
            listen(host, port, flag="--metrics-port").close()
        groups = [
            {
                "targets": [f"{host if host != '0.0.0.0' else '127.0.0.1'}:{port}"],
                "labels": {"job": "headwater", "component": component, "name": name},
            }
            for (component, name), port in ports.items()
        ]
        path = self._data / TARGETS
        path.with_suffix(".new").write_bytes(msgspec.json.format(msgspec.json.encode(groups)))
        path.with_suffix(".new").replace(path)

    def _plain(self) -> list[str]:
        settings = self._settings
        return [
            *self._access(),
            "--namespace", settings.namespace,
            "--log-level", settings.log_level,
            "--log-format", settings.log_format,
        ]  # fmt: skip

    def _common(self) -> list[str]:
        return [*self._plain(), "--drain-s", str(self._settings.drain_s)]

    def _access(self) -> list[str]:
        """How a child reaches the server. A URL with a secret goes by environment: everybody sees flags."""
        flags = [] if "@" in self.nats else ["--nats", self.nats]
        for name in NATS:
            value = getattr(self._settings, name)
            if name not in ("nats", "nats_port") and value:
                flags += ["--" + name.replace("_", "-"), str(value)]
        return flags

    def _environ(self) -> dict[str, str]:
        return {ENV_PREFIX + "NATS": self.nats} if "@" in self.nats else {}

    async def _start_nats(self) -> None:
        settings = self._settings
        port = nats_server.free_port(settings.nats_port)
        if port != settings.nats_port and settings.nats_port not in (0, Settings().nats_port):
            raise ConfigError(
                f"--nats-port {settings.nats_port} is taken: choose another one, or 0 for a free one"
            )
        if port != settings.nats_port and settings.nats_port:
            _log.warning("nats_port_taken", wanted=settings.nats_port, used=port)
        monitor = nats_server.free_port(0)
        config = nats_server.write_config(self._data / "nats", port, monitor_port=monitor)
        command = [nats_server.binary(), "-c", str(config)]
        # SIGTERM lets the server finish its writes; SIGINT would too.
        server = Child("nats-server", command, log_file=str(self._data / "nats" / "nats-server.log"))
        self._supervise(server)
        await nats_server.wait_until_up(port)
        store = self._data / "nats" / "jetstream"
        self._keeping.append(asyncio.create_task(watch_store(monitor, store, server.restart), name="store"))
        self.nats = f"nats://127.0.0.1:{port}"

    def _add(
        self,
        name: str,
        arguments: list[str],
        command: str,
        *,
        lease: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        async def on_exit(pid: int) -> None:
            if self._leases is not None and lease:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2.0):
                        await bury(self._leases, "worker", lease, pid)

        self._supervise(
            Child(
                name,
                headwater_command(command, *arguments),
                on_exit=on_exit,
                environ=self._environ() | dict(environ or {}),
                # A worker that ends well was told to, by `headwater ctl stop`.
                may_end=command == "engine",
            )
        )

    def _supervise(self, child: Child) -> None:
        async def watch() -> None:
            try:
                await supervise(child.name, child.run, SystemClock(), RestartPolicy())
            except GaveUp as error:
                if not self.failure.done():
                    self.failure.set_result(str(error))

        self._children.append((child, asyncio.create_task(watch(), name=child.name)))

    async def ready(self) -> None:
        """Wait until the edge serves with every worker, telling what is awaited."""
        started = told = time.monotonic()
        while True:
            health = await _health(self.url)
            joined = sum(health.get("workers", {}).values())
            if health.get("status") == "ok" and joined >= len(self.workers):
                return
            now = time.monotonic()
            if now - told >= PROGRESS_S:
                told = now
                what = "edge and router" if not health else f"workers ({joined} of {len(self.workers)})"
                print(f"  waiting for {what}, {now - started:.0f} s …", file=sys.stderr, flush=True)
            await asyncio.sleep(READY_POLL_S)

    def pid(self, name: str) -> int:
        """Process id of a child, 0 while it is down."""
        return next(child.pid for child, _ in self._children if child.name == name)

    async def model(self) -> str:
        """Name of a served model."""
        document = await _get(self.url, "/v1/models")
        return str(document["data"][0]["id"])

    async def stop(self) -> None:
        """End every process, in order."""
        order = {"admin": 0, "edge": 0, "router": 2, "nats-server": 4}
        for task in self._keeping:
            task.cancel()
        stages = sorted({order.get(child.name, 1) for child, _ in self._children})
        for stage in stages:
            if stage == 4 and self._client is not None:
                await self._client.close()
            group = [pair for pair in self._children if order.get(pair[0].name, 1) == stage]
            await asyncio.gather(*(child.stop() for child, _ in group))
            for _, task in group:
                task.cancel()
            await asyncio.gather(*(task for _, task in group), return_exceptions=True)
        if self._client is not None and not self._client.is_closed:
            await self._client.close()
        self._held.close()


async def up(settings: Settings, stop: asyncio.Event) -> int:
    """Run a fleet until stopped. Exit code 1 if a process can not be kept alive."""
    began = time.monotonic()
    fleet = Fleet(settings)
    waiting = asyncio.ensure_future(stop.wait())
    try:
        print(f"starting {len(fleet.workers)} {settings.engine} worker(s) …", file=sys.stderr, flush=True)
        await fleet.start()
        ready = asyncio.ensure_future(fleet.ready())
        ends: set[asyncio.Future[Any]] = {waiting, fleet.failure}
        await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            print(_greeting(fleet.url, fleet.nats, await fleet.model(), time.monotonic() - began), flush=True)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if fleet.failure.done():
            print(f"headwater: {fleet.failure.result()}", file=sys.stderr, flush=True)
            return 1
        print("stopping: finishing what runs …", file=sys.stderr, flush=True)
        return 0
    finally:
        waiting.cancel()
        with contextlib.suppress(LogError):
            await fleet.stop()


def _greeting(url: str, nats: str, model: str, seconds: float) -> str:
    body = msgspec.json.encode(
        {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    ).decode()
    return (
        f"headwater is ready at {url}/v1 after {seconds:.1f} s (model {model}, NATS {without_secret(nats)})\n"
        f"try: curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    )


async def _health(url: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = await _get(url, "/health")
        return document
    except (OSError, ValueError, TimeoutError):
        return {}


async def _get(url: str, path: str) -> Any:
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(5.0):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
