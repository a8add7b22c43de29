"""The processes that one machine runs of a fleet, each supervised: by `headwater up` all of a fleet, by `headwater launch` a host's part.

    machine ─┬─ nats-server      JetStream in the data folder, unless another server is used
             ├─ routers
             ├─ edges            of one address: they share its port
             ├─ admin, console, tracer, picker
             ├─ engine host (for an engine whose import is shared: one process that imports, then forks the workers)
             └─ or one process per worker (in the environment of its engine)

They stop in an order in which no process waits for one that is gone: edges, workers, routers, server.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import structlog

from headwater.actors.runtime.lease import TTL_S
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.engines import logs, registry
from headwater.engines.launcher import DEVICES, visible_gpus
from headwater.events.jetstream import Connection, JetStreamTable
from headwater.events.jetstream.streams import ensure_namespace
from headwater.ops.config.processes import (
    AdminProcess,
    ConsoleProcess,
    EdgeProcess,
    EngineProcess,
    LogSettings,
    MetricsSettings,
    PickerProcess,
    RouterProcess,
    TracerProcess,
    process_words,
)
from headwater.ops.config.sections import (
    ConsoleSettings,
    NatsSettings,
    StreamSettings,
    check_access,
    check_console,
    receiver_of,
)
from headwater.ops.config.setting import ENV_PREFIX, ConfigError
from headwater.ops.config.worker import FleetSettings
from headwater.ops.diagnosis import check_room, free_bytes, log_findings
from headwater.ops.history.trace_spans import need_opentelemetry
from headwater.ops.monitoring.files import TARGETS
from headwater.ops.nats import server as nats_server
from headwater.ops.nats.connect import get_json, open_connection, watch_store
from headwater.ops.start import admin, engine_process, plan
from headwater.ops.start.actor import keep_namespace, keep_pools, revoke_leases_of
from headwater.ops.start.children import Child, ChildGroup, headwater_command
from headwater.ops.start.data_folder import held
from headwater.ops.start.edge import certificate, check_picker
from headwater.ops.start.model_source import with_folder
from headwater.ops.start.plan import WorkerPlan
from headwater.ops.start.sockets import bind, free_port, free_range
from headwater.ops.start.spawner import Spawner
from headwater.schemas import subjects
from headwater.schemas.names import host_port, reachable, split_host_port
from headwater.schemas.tables import Lease, LeaseKind, ModelCard

READY_POLL_S = 0.05
HEALTH_S = 5.0
PROGRESS_S = 3.0

NAME_POLL_S = 0.25
STOP_MARGIN_S = 10.0
"""How much longer than its drain timeout a process has before it is killed."""

_log = structlog.get_logger("headwater.up")


class ServerPlan(NamedTuple):
    """The NATS server to start on a machine.

    `settings` go over the configuration of a server that listens on the loopback address only. With `exact_port` no free port
    replaces one that is taken.
    """

    port: int
    host: str = "127.0.0.1"
    exact_port: bool = False
    settings: Mapping[str, Any] = {}


class MachinePlan(NamedTuple):
    """What one machine runs of a fleet: the settings of each process.

    Ports of metrics, and what follows from a server that is started here, are added when they are started. `wanted_workers` is the
    number of workers of the whole fleet, without which it is not ready; `has_picker`: it has an endpoint picker, here or elsewhere, so that
    workers tell which edge is beside them, at this machine's `address` where that edge listens on all. `followers` are parts of workers of other machines.
    """

    data_dir: str
    drain_timeout: float
    nats: NatsSettings
    streams: StreamSettings
    metrics: MetricsSettings
    log: LogSettings
    server: ServerPlan | None = None
    edges: tuple[EdgeProcess, ...] = ()
    routers: tuple[RouterProcess, ...] = ()
    engines: tuple[EngineProcess, ...] = ()
    followers: tuple[EngineProcess, ...] = ()
    admin: AdminProcess | None = None
    console: ConsoleProcess | None = None
    tracer: TracerProcess | None = None
    picker: PickerProcess | None = None
    wanted_workers: int = 0
    has_picker: bool = False
    address: str = ""
    started_by: str = "up"

    @property
    def singles(self) -> list[tuple[str, Any]]:
        """The processes of which a machine has one at most, each with its command."""
        found = (
            ("admin", self.admin),
            ("console", self.console),
            ("tracer", self.tracer),
            ("picker", self.picker),
        )
        return [(command, process) for command, process in found if process is not None]


class Machine:
    """The supervised processes of one machine."""

    forked_engines: ClassVar[frozenset[str]] = frozenset()
    """Engines that are forked from the spawner although they load something: their libraries are not to find anything imported."""

    def __init__(
        self,
        machine_plan: MachinePlan,
        spawner: Spawner | None = None,
        *,
        before_server: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`before_server` is awaited at the end, before the NATS server stops."""
        self._plan = machine_plan
        self._before_server = before_server
        self._spawner = spawner
        self._data = Path(machine_plan.data_dir)
        metrics = machine_plan.metrics
        others = [("edge", process.name) for process in machine_plan.edges]
        others += [("router", process.name) for process in machine_plan.routers]
        others += [
            (command, process.name)
            for command, process in machine_plan.singles
            if "metrics" in process._fields
        ]
        workers = sum(len(plan.names(process)) for process in machine_plan.engines)
        first = metrics.port or free_range(workers + len(others), metrics.host)
        # The workers' ports first: one process may host several, and plans them in the same way.
        self._engines = list(_engines_with_ports(machine_plan.engines, metrics, first))
        self._planned = _planned(self._engines)
        self.workers = [worker for workers_of_one in self._planned for worker in workers_of_one]
        self._metrics = {
            name: metrics._replace(port=first + workers + number) for number, (_, name) in enumerate(others)
        }
        self._others = others
        self._held = contextlib.ExitStack()
        self._children = ChildGroup()
        self._leases: JetStreamTable | None = None
        self._client: Connection | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self.nats = machine_plan.nats
        self.url = ""
        self.console_url = ""

    async def start(self) -> None:
        """Start everything; returns when each process runs, not yet when the fleet is ready."""
        machine_plan = self._plan
        self._held.enter_context(held(self._data, machine_plan.started_by))
        log_findings(check_room([(str(self._data), free_bytes(self._data))]))
        self._check()
        self._prepare_engines()
        address = self._choose_address()
        if machine_plan.has_picker and machine_plan.edges:
            host = machine_plan.address or reachable(address[0])
            endpoint = host_port(host, address[1])
            self._engines = [plan.with_endpoint(process, endpoint) for process in self._engines]
        self._write_targets()
        if machine_plan.server is not None:
            await self._start_nats(machine_plan.server)
        client = self._client = await open_connection(self.nats, "operator", machine_plan.started_by)
        nats_server.report_server(client)
        namespace, replicas = self.nats.namespace, machine_plan.streams.replicas
        sizes = machine_plan.streams.sizes
        await self._make_streams(client)
        # Actors that log in as such may not create streams.
        streams = keep_namespace(client, namespace, replicas, sizes)
        keepers = (streams, keep_pools(client, namespace, replicas, sizes))
        self._keepers += [asyncio.create_task(keeper, name="streams") for keeper in keepers]
        self._leases = JetStreamTable(client, subjects.lease_bucket(namespace))
        await self._check_names(LeaseTable(self._leases))
        self._start_routers()
        self._start_operators_processes()
        for edge in machine_plan.edges:
            http = edge.http._replace(
                host=address[0], port=address[1], share_port=len(machine_plan.edges) > 1
            )
            self._add(edge.name, "edge", self._with_access(edge._replace(http=http)))
        for number, engines in enumerate(self._engines):
            self._start_engines(number, engines._replace(nats=self._access))
        for follower in machine_plan.followers:
            engine_process.prepare(
                follower.worker.engine, engine_process.named_python(follower, follower.worker.engine)
            )
            process_settings, after = plan.apart(self._with_access(with_folder(follower)))
            self._add(f"{follower.name}-follower", "engine", process_settings, after)

    async def _make_streams(self, client: Connection) -> None:
        """Create the namespace's streams. A cluster whose servers start now has no leader for some seconds. Raises `LogError`."""
        streams = self._plan.streams

        async def make() -> None:
            await ensure_namespace(
                client, self.nats.namespace, replicas=streams.replicas, sizes=streams.sizes
            )

        is_cluster = self._plan.server is not None and "cluster" in self._plan.server.settings
        await (nats_server.while_it_starts(make) if is_cluster else make())

    def _check(self) -> None:
        """Check all settings before anything is downloaded or started. Raises `ConfigError` or `EngineUnavailable`."""
        machine_plan = self._plan
        for engines, workers in zip(self._engines, self._planned, strict=True):
            plan.check_plan(engines, workers)
        if machine_plan.console is not None:
            check_console(machine_plan.console.console, machine_plan.console.auth)
        if machine_plan.tracer is not None:
            receiver_of(machine_plan.tracer.trace.otlp)
            need_opentelemetry()
        if machine_plan.admin is not None:
            admin.check(machine_plan.admin)
        if machine_plan.picker is not None:
            check_picker(machine_plan.picker.picker)
        for edge in machine_plan.edges[:1]:
            check_access(edge.auth, edge.http.host)

    def _prepare_engines(self) -> None:
        """Download or make models, and make engines' environments, here where progress is visible, not in a worker's log."""
        for number, engines in enumerate(self._engines):
            self._engines[number] = engines = with_folder(engines)
            plan.check_model(engines)
            for engine in {worker.engine for worker in self._planned[number]}:
                engine_process.prepare(engine, engine_process.named_python(engines, engine))

    def _choose_address(self) -> tuple[str, int]:
        """The address of this machine's edges, which is free. Raises `ConfigError`."""
        if not self._plan.edges:
            return "", 0
        http = self._plan.edges[0].http
        # Not a port of the system's choice: that may be a client's by the time the edge listens, or is restarted.
        listener = bind(http.host, http.port or free_port(0, http.host))
        host, port = listener.getsockname()[:2]
        listener.close()
        scheme = "https" if certificate(http.tls_cert, http.tls_key) else "http"
        self.url = f"{scheme}://{host_port(reachable(host), port)}"
        return host, port

    async def _check_names(self, leases: LeaseTable) -> None:
        """Each name is free, or is soon: a fleet that was killed leaves its leases for seconds. Raises `ConfigError`."""
        named: list[tuple[LeaseKind, str]] = [("router", process.name) for process in self._plan.routers]
        named += [("edge", process.name) for process in self._plan.edges]
        named += [("worker", worker.name) for worker in self.workers]
        deadline_s = time.monotonic() + TTL_S + 1.0
        for kind, name in named:
            while (lease := await leases.get(kind, name)) is not None:
                if time.monotonic() > deadline_s:
                    raise ConfigError(
                        f"{kind} {name} of namespace {self.nats.namespace} runs already, as process {lease.pid} on {lease.host}: stop it, or "
                        "choose another --namespace"
                    )
                await asyncio.sleep(NAME_POLL_S)

    def _with_access(self, process: Any) -> Any:
        """A process's settings with its way to the server, its port of metrics, and how it logs."""
        more: dict[str, Any] = {"nats": self._access, "log": self._plan.log}
        if process.name in self._metrics and "metrics" in process._fields:
            more["metrics"] = self._metrics[process.name]
        return process._replace(**more)

    def _start_routers(self) -> None:
        for router in self._plan.routers:
            # In the data folder: removing the log removes the snapshots of it.
            folder = router.cache_dir or str(self._data / "cache")
            self._add(router.name, "router", self._with_access(router._replace(cache_dir=folder)))

    def _start_operators_processes(self) -> None:
        """Start the admin port, the console, the tracer and the picker, if wanted."""
        machine_plan = self._plan
        if machine_plan.admin is not None:
            tokens = str(Path(machine_plan.admin.admin.token_file).resolve())
            admin_settings = machine_plan.admin.admin._replace(token_file=tokens)
            self._add("admin", "admin", self._with_access(machine_plan.admin._replace(admin=admin_settings)))
        if machine_plan.console is not None:
            self._start_console(machine_plan.console)
        for command, process in (("tracer", machine_plan.tracer), ("picker", machine_plan.picker)):
            if process is not None:
                self._add(command, command, self._with_access(process))

    def _start_console(self, process: ConsoleProcess) -> None:
        console_settings = process.console
        port = free_port(console_settings.port, console_settings.host)
        if port != console_settings.port and console_settings.port != ConsoleSettings().port:
            raise ConfigError(
                f"--console-port {console_settings.port} is taken: choose another one, or 0 for no console"
            )
        tokens = str(Path(console_settings.token_file).resolve()) if console_settings.token_file else ""
        console = console_settings._replace(port=port, token_file=tokens)
        self._add("console", "console", self._with_access(process._replace(console=console)))
        self.console_url = f"http://{host_port(reachable(console_settings.host), port)}"

    def _start_engines(self, number: int, engines: EngineProcess) -> None:
        """Start the workers of one entry of the plan: where the import of `--engine` is shared, its workers in one process, others each in their own."""
        workers = self._planned[number]
        hosted = plan.launcher_for(engines).shares_import()
        if hosted:
            name = "engines" if len(self._engines) == 1 else f"engines-{number}"
            self._add(name, "engine", *plan.apart(plan.without_added(engines)))
        for worker in workers:
            if hosted and worker.engine == engines.worker.engine:
                continue
            environ = {DEVICES: ",".join(worker.gpus)} if worker.gpus else {}
            # One worker is what an engine process has: its name says so already.
            process_settings, after = plan.apart(
                plan.of_worker(engines, worker)._replace(fleet=FleetSettings())
            )
            self._add(worker.name, "engine", process_settings, after, lease=worker.name, environ=environ)

    def _write_targets(self) -> None:
        """Write the file that lists all metrics endpoints. Raises `ConfigError` for a port that is taken."""
        host = self._plan.metrics.host
        ports = {("worker", worker.name): worker.metrics_port for worker in self.workers}
        ports |= {(kind, name): self._metrics[name].port for kind, name in self._others}
        for port in ports.values():
            bind(host, port, flag="--metrics-port").close()
        groups = [
            {
                "targets": [host_port(reachable(host), port)],
                "labels": {"job": "headwater", "component": component, "name": name},
            }
            for (component, name), port in ports.items()
        ]
        path = self._data / TARGETS
        path.with_suffix(".new").write_bytes(msgspec.json.format(msgspec.json.encode(groups)))
        path.with_suffix(".new").replace(path)

    @property
    def _access(self) -> NatsSettings:
        """How a child reaches the server. A URL with a secret is not among its flags, which every user can read."""
        return self.nats._replace(url="") if "@" in self.nats.url else self.nats

    def _environ(self) -> dict[str, str]:
        return {f"{ENV_PREFIX}NATS": self.nats.url} if "@" in self.nats.url else {}

    async def _start_nats(self, server_plan: ServerPlan) -> None:
        port = free_port(server_plan.port, server_plan.host)
        if port != server_plan.port and server_plan.exact_port:
            raise ConfigError(
                f"--nats-port {server_plan.port} is taken: choose another one, or 0 for a free one"
            )
        if port != server_plan.port and server_plan.port:
            _log.warning("nats_port_taken", wanted=server_plan.port, used=port)
        monitor = free_port(0)
        folder = self._data / "nats"
        config = nats_server.write_config(folder, port, monitor_port=monitor, settings=server_plan.settings)
        traced = ["-D"] if self._plan.log.level == "debug" else []
        command = [nats_server.binary(), "-c", str(config), *traced]
        # SIGTERM lets the server finish its writes; SIGINT would too.
        server = Child("nats-server", command, log_file=str(folder / "nats-server.log"))
        self._children.add(server)
        await nats_server.wait_until_up(port, reachable(server_plan.host))
        store = folder / "jetstream"
        self._keepers.append(asyncio.create_task(watch_store(monitor, store, server.restart), name="store"))
        if not self.nats.url:
            self.nats = self.nats._replace(url=f"nats://127.0.0.1:{port}")

    def _is_forked(self, engine: str) -> bool:
        """Return whether the workers of an engine are forked from the spawner."""
        return engine in self.forked_engines or registry.traits_of(engine).loads == "nothing"

    def _add(
        self,
        name: str,
        command: str,
        settings: NamedTuple,
        after: Sequence[str] = (),
        *,
        lease: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        async def on_exit(pid: int) -> None:
            if self._leases is not None and lease:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2.0):
                        await revoke_leases_of(self._leases, "worker", lease, pid)

        forked = isinstance(settings, EngineProcess) and self._is_forked(settings.worker.engine)
        spawner = self._spawner if command != "engine" or forked else None
        line = [command, *process_words(settings), *after]
        self._children.add(
            Child(
                name,
                line if spawner is not None else headwater_command(*line),
                on_exit=on_exit,
                environ=self._environ() | dict(environ or {}),
                # A worker that ends with 0 was stopped by `headwater ctl stop`; after a signal it ends with another code.
                may_end=command == "engine",
                spawner=spawner,
                wraps=("worker" if command == "engine" else command) if logs.is_json() else "",
                stop_timeout_s=self._plan.drain_timeout + STOP_MARGIN_S,
            ),
            is_worker=command == "engine",
        )

    async def ready(self) -> None:
        """Wait until this machine's part of the fleet serves: its edge with every worker, or without an edge its own workers; prints progress."""
        started = printed = time.monotonic()
        while True:
            joined, expected, waits_for = await self._progress()
            if not waits_for:
                self._children.was_ready = True
                return
            now = time.monotonic()
            if now - printed >= PROGRESS_S:
                printed = now
                awaited = f"{waits_for} ({joined} of {expected})" if expected else waits_for
                if logs.is_json():
                    _log.info("fleet_waiting", waits_for=awaited, seconds=round(now - started, 1))
                else:
                    print(f"  waiting for {awaited}, {now - started:.0f} s …", file=sys.stderr, flush=True)
            await asyncio.sleep(READY_POLL_S)

    async def _progress(self) -> tuple[int, int, str]:
        """How many workers of how many have joined, and what is waited for, "" when this machine's part is ready."""
        if self._plan.edges:
            health = await _health(self.probe_url)
            joined = sum(health.get("workers", {}).values())
            expected = max(self._plan.wanted_workers, len(self.workers))
            if health.get("status") == "ok" and joined >= expected:
                return joined, expected, ""
            return (joined, expected, "workers") if health else (0, 0, "edge and router")
        worker_names = {worker.name for worker in self.workers}
        joined = len(worker_names & {lease.name for lease in await self._worker_leases()})
        return joined, len(worker_names), "workers" if joined < len(worker_names) else ""

    async def _worker_leases(self) -> list[Lease]:
        assert self._leases is not None
        return [one for one in await LeaseTable(self._leases).read_all() if one.kind == "worker"]

    def pid(self, name: str) -> int:
        """Process id of a child, 0 while it is down."""
        return self._children.pid(name)

    @property
    def failure(self) -> "asyncio.Future[str]":
        """See `ChildGroup.failure`."""
        return self._children.failure

    @property
    def authenticates(self) -> bool:
        """True if clients must show a credential."""
        return any(edge.auth.mode != "none" for edge in self._plan.edges)

    async def model(self) -> ModelCard:
        """The card of a model that its workers serve: earlier runs may have left others."""
        assert self._client is not None
        cards = CardTable(JetStreamTable(self._client, subjects.card_bucket(self.nats.namespace)))
        live = {lease.pool for lease in await self._worker_leases()}
        return min(await cards.models(), key=lambda card: (card.pool not in live, card.name))

    @property
    def probe_url(self) -> str:
        """The first edge's metrics port: its own may demand TLS and keys."""
        metrics = self._metrics[self._plan.edges[0].name]
        return f"http://{host_port(reachable(metrics.host), metrics.port)}"

    async def stop(self) -> None:
        """End every process, in order."""
        for task in self._keepers:
            task.cancel()
        await self._children.stop(
            "admin", "console", "picker", *(process.name for process in self._plan.edges)
        )
        await self._children.stop_workers()
        # What the tracer has not sent is sent by the next one.
        await self._children.stop("tracer", *(process.name for process in self._plan.routers))
        if self._client is not None and not self._client.is_closed:
            await self._client.close()
        if self._before_server is not None:
            await self._before_server()
        # The server.
        await self._children.stop()
        if self._spawner is not None:
            self._spawner.close()
        self._held.close()


def _engines_with_ports(
    engines: Sequence[EngineProcess], metrics: MetricsSettings, first: int
) -> Iterator[EngineProcess]:
    """The settings of engine processes with consecutive ports of metrics."""
    for process in engines:
        yield process._replace(metrics=metrics._replace(port=first))
        first += len(plan.names(process))


def _planned(engines: Sequence[EngineProcess]) -> list[list[WorkerPlan]]:
    """The workers of each entry, with GPUs of this machine in the order of the entries. Raises `ConfigError` if there are too few."""
    gpus = visible_gpus(os.environ) if any(map(plan.uses_gpus, engines)) else ()
    planned, first = [], 0
    for process in engines:
        needed = plan.gpus_needed(process)
        if gpus and first + needed > len(gpus):
            raise ConfigError(
                f"the workers of this machine need {sum(map(plan.gpus_needed, engines))} GPUs, and {len(gpus)} are visible: "
                "start fewer workers, or make --gpus-per-worker or the tensor-parallel size smaller"
            )
        planned.append(plan.plan(process, devices=(*gpus[first:], *gpus[:first])))
        first += needed
    return planned


async def _health(url: str) -> dict[str, Any]:
    """The body of /health, empty while nothing answers."""
    try:
        return await get_json(*split_host_port(url.removeprefix("http://")), "/health", timeout_s=HEALTH_S)
    except (OSError, ValueError, TimeoutError):
        return {}
