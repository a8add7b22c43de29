"""`headwater up`: a whole fleet as supervised processes of this machine.

    up ─┬─ nats-server      JetStream in the data folder, loopback only
        ├─ router
        ├─ edge
        ├─ admin            only with --admin-port
        ├─ console          unless --console-port is 0
        ├─ tracer           only with --otlp
        ├─ engine host (for an engine whose import is shared: one process that imports, then forks the workers)
        └─ or one process per worker (in the environment of its engine)

They stop in an order in which no process waits for one that is gone: edge, workers, router, server.

<data-dir>/lock      held by the `up` that uses the directory; says who that is
<data-dir>/format    the version of what lies here
"""

import asyncio
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import structlog

from headwater.actors.runtime.actor import cancel_all
from headwater.actors.runtime.lease import TTL_S
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.engines import logs, registry
from headwater.engines.launcher import DEVICES, visible_gpus
from headwater.engines.process import EngineInterrupted
from headwater.events.jetstream import Connection, JetStreamTable, without_secret
from headwater.events.jetstream.streams import ensure_namespace
from headwater.events.ports import LogError
from headwater.ops.config.edge import ConsoleSettings, HttpSettings, check_access, check_console
from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.processes import (
    AdminProcess,
    ConsoleProcess,
    EdgeProcess,
    EngineProcess,
    LocalFleetSettings,
    RouterProcess,
    TracerProcess,
    process_words,
)
from headwater.ops.config.setting import ENV_PREFIX, ConfigError
from headwater.ops.config.trace import receiver_of
from headwater.ops.config.worker import FleetSettings
from headwater.ops.diagnosis.disk import check_room, free_bytes
from headwater.ops.diagnosis.report import report
from headwater.ops.model_download.source import with_folder
from headwater.ops.monitoring.files import TARGETS
from headwater.ops.nats import server as nats_server
from headwater.ops.nats.connect import open_connection, watch_store
from headwater.ops.process import admin
from headwater.ops.process.actor import keep_namespace, keep_pools, revoke_leases_of
from headwater.ops.process.edge import certificate_of
from headwater.ops.process.sockets import bind, free_port, free_range
from headwater.ops.start import environment, make_engine, plan
from headwater.ops.start.children import Child, ChildGroup, headwater_command
from headwater.ops.start.spawner import Main, Spawner
from headwater.ops.tracing.otlp import need_opentelemetry
from headwater.schemas import subjects
from headwater.schemas.addresses import host_port, reachable, split_host_port
from headwater.schemas.tables import LeaseKind, ModelCard

FORMAT: Final = 1
_LOCK, _FORMAT = "lock", "format"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Use the directory, made where it is missing, until the block ends. The kernel frees it when the process dies.

    Raises `ConfigError` where another process uses it, it cannot be written, or a newer release has written it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        _lock(handle, folder)
        _check_format(folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        raise ConfigError(
            f"--data-dir {folder} is used by {holder}: stop that fleet, or choose another --data-dir"
        ) from None
    except OSError as error:
        raise _unusable(folder, error) from error
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"`headwater up` with pid {os.getpid()} since {since}\n".encode(), 0)
    except OSError as error:
        raise _unusable(folder, error) from error


def _check_format(folder: Path) -> None:
    path = folder / _FORMAT
    try:
        text = path.read_bytes().decode("ascii", "replace").strip()
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise _unusable(folder, error) from error
    if text and not (text.isdigit() and len(text) < 10):
        raise ConfigError(f"{path} says {text[:40]!r}, which is no format version: it is not Headwater's")
    if text and int(text) > FORMAT:
        raise ConfigError(
            f"--data-dir {folder} has format {text}, written by a newer release; this one knows format {FORMAT}: "
            "use that release, or another --data-dir"
        )
    if not text:
        try:
            path.write_text(f"{FORMAT}\n")
        except OSError as error:
            raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--data-dir {folder} cannot be used: {(error.strerror or str(error)).lower()}; choose another one"
    )


# The fleet.


def example_request(card: ModelCard, key: str) -> str:
    """The path after /v1/ and further arguments of curl; `key` are those for authentication."""
    if card.speech is not None:
        return f"audio/transcriptions{key} -F model={card.name} -F file=@speech.wav"
    path = "chat/completions"
    example: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    if card.image_generation is not None:
        path, example = "images/generations", {"prompt": "a river at its source"}
    elif card.video_generation is not None:
        path, example = "videos", {"prompt": "a river at its source"}
    elif "generate" not in card.capabilities:
        path, example = "embeddings", {"input": "Hello!"}
    body = msgspec.json.encode({"model": card.name, **example}).decode()
    return f"{path} -H 'content-type: application/json'{key} -d '{body}'"


READY_POLL_S = 0.05
PROGRESS_S = 3.0

NAME_POLL_S = 0.25
STOP_MARGIN_S = 10.0
"""How much longer than its drain timeout a process has before it is killed."""

OTHER_PROCESSES = ("edge-0", "router-0")
TRACER = "tracer-0"

_log = structlog.get_logger("headwater.up")


class LocalFleet:
    """The processes of one `headwater up`."""

    forked_engines: ClassVar[frozenset[str]] = frozenset()
    """Engines that are forked from the spawner although they load something: their libraries are not to find anything imported."""

    def __init__(self, settings: LocalFleetSettings, spawner: Spawner | None = None) -> None:
        self._settings = settings
        self._spawner = spawner
        engines = settings.engine_process
        gpus = visible_gpus(os.environ) if plan.uses_gpus(engines) else ()
        metrics = settings.metrics
        others = (*OTHER_PROCESSES, TRACER) if settings.trace.otlp else OTHER_PROCESSES
        first = metrics.port or free_range(len(plan.names(engines)) + len(others), metrics.host)
        # The workers' ports first: one process may host them all, and plans them in the same way.
        self._engines = engines._replace(metrics=metrics._replace(port=first))
        self.workers = plan.plan(self._engines, devices=gpus)
        self._metrics = {
            name: metrics._replace(port=first + len(self.workers) + number)
            for number, name in enumerate(others)
        }
        self._data = Path(settings.data_dir)
        self._held = contextlib.ExitStack()
        self._children = ChildGroup()
        self._leases: JetStreamTable | None = None
        self._client: Connection | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self.nats = settings.nats
        self.url = ""
        self.console_url = ""

    async def start(self) -> None:
        """Start everything; returns when each process runs, not yet when the fleet is ready."""
        settings = self._settings
        self._held.enter_context(held(self._data))
        if settings.streams.replicas > 1 and not self.nats.url:
            raise ConfigError(
                f"--replicas {settings.streams.replicas} needs a cluster of NATS servers: give its URL with --nats"
            )
        report(check_room([(str(self._data), free_bytes(self._data))]))
        plan.check(self._engines, self.workers)
        # A model is downloaded or made here, and an engine's environment, where progress is visible, not in a worker's log.
        self._engines = with_folder(self._engines)
        make_engine.check_model(self._engines)
        for engine in {worker.engine for worker in self.workers}:
            environment.prepare(engine, environment.named_python(settings, engine))
        if settings.console.port:
            check_console(settings.console, settings.auth)
        if settings.trace.otlp:
            receiver_of(settings.trace.otlp, settings.trace.protocol)
            need_opentelemetry()
        if settings.admin.port:
            admin.check(AdminProcess(admin=settings.admin, nats=settings.nats))
        check_access(settings.auth, settings.http.host)
        # Not a port of the system's choice: that may be a client's by the time the edge listens, or is restarted.
        wanted = settings.http.port or free_port(0, settings.http.host)
        listener = bind(settings.http.host, wanted)
        host, port = listener.getsockname()[:2]
        listener.close()
        scheme = "https" if certificate_of(settings.http) else "http"
        self.url = f"{scheme}://{host_port(reachable(host), port)}"
        self._write_targets()
        if not self.nats.url:
            await self._start_nats()
        client = self._client = await open_connection(self.nats, "operator", "up")
        nats_server.report_server(client)
        namespace, replicas = self.nats.namespace, settings.streams.replicas
        sizes = settings.streams.sizes
        await ensure_namespace(client, namespace, replicas=replicas, sizes=sizes)
        # Actors that log in as such may not create streams.
        streams = keep_namespace(client, namespace, replicas, sizes)
        keepers = (streams, keep_pools(client, namespace, replicas, sizes))
        self._keepers += [asyncio.create_task(keeper, name="streams") for keeper in keepers]
        self._leases = JetStreamTable(client, subjects.lease_bucket(namespace))
        await self._check_names(LeaseTable(self._leases))
        self._start_router()
        if settings.admin.port:
            tokens = str(Path(settings.admin.token_file).resolve())
            own = settings.admin._replace(token_file=tokens)
            self._add("admin", "admin", AdminProcess(admin=own, nats=self._access, log=settings.log))
        if settings.console.port:
            self._start_console()
        if settings.trace.otlp:
            self._start_tracer()
        self._start_edge(settings.http._replace(host=host, port=port))
        self._start_engines()

    async def _check_names(self, leases: LeaseTable) -> None:
        """Each name is free, or is soon: a fleet that was killed leaves its leases for seconds. Raises `ConfigError`."""
        workers: list[tuple[LeaseKind, str]] = [("worker", worker.name) for worker in self.workers]
        deadline_s = time.monotonic() + TTL_S + 1.0
        others: list[tuple[LeaseKind, str]] = [("router", "router-0"), ("edge", "edge-0")]
        for kind, name in [*others, *workers]:
            while (held := await leases.get(kind, name)) is not None:
                if time.monotonic() > deadline_s:
                    raise ConfigError(
                        f"{kind} {name} of namespace {self.nats.namespace} runs already, as process {held.pid} on {held.host}: stop it, or "
                        "choose another --namespace"
                    )
                await asyncio.sleep(NAME_POLL_S)

    def _start_router(self) -> None:
        settings = self._settings
        router = RouterProcess(
            name="router-0",
            # In the data folder: removing the log removes the snapshots of it.
            cache_dir=settings.cache_dir or str(self._data / "cache"),
            router=settings.router,
            busy=settings.busy,
            queue=settings.queue,
            nats=self._access,
            streams=settings.streams,
            metrics=self._metrics["router-0"],
            log=settings.log,
        )
        self._add("router", "router", router)

    def _start_console(self) -> None:
        settings = self._settings
        own = settings.console
        port = free_port(own.port, own.host)
        if port != own.port and own.port != ConsoleSettings().port:
            raise ConfigError(f"--console-port {own.port} is taken: choose another one, or 0 for no console")
        tokens = str(Path(own.token_file).resolve()) if own.token_file else ""
        console = ConsoleProcess(
            console=own._replace(port=port, token_file=tokens),
            auth=settings.auth,
            nats=self._access,
            log=settings.log,
        )
        self._add("console", "console", console)
        self.console_url = f"http://{host_port(reachable(own.host), port)}"

    def _start_tracer(self) -> None:
        settings = self._settings
        tracer = TracerProcess(
            name=TRACER,
            data_dir=str(self._data),
            trace=settings.trace,
            nats=self._access,
            metrics=self._metrics[TRACER],
            log=settings.log,
        )
        self._add("tracer", "tracer", tracer)

    def _start_edge(self, http: HttpSettings) -> None:
        settings = self._settings
        edge = EdgeProcess(
            name="edge-0",
            drain_timeout=settings.drain_timeout,
            http=http,
            edge=settings.edge,
            media=settings.media,
            media_transfer=settings.media_transfer,
            auth=settings.auth,
            nats=self._access,
            streams=settings.streams,
            metrics=self._metrics["edge-0"],
            log=settings.log,
        )
        self._add("edge", "edge", edge)

    def _start_engines(self) -> None:
        """Start the workers: where the import of `--engine` is shared, its workers in one process, others each in their own."""
        engines = self._engines._replace(nats=self._access)
        hosted = plan.launcher_for(engines).shares_import()
        if hosted:
            self._add("engines", "engine", *plan.apart(plan.without_added(engines)))
        for worker in self.workers:
            if hosted and worker.engine == engines.worker.engine:
                continue
            environ = {DEVICES: ",".join(worker.gpus)} if worker.gpus else {}
            # One worker is what an engine process has: its name says so already.
            own, after = plan.apart(plan.of_worker(engines, worker)._replace(fleet=FleetSettings()))
            self._add(worker.name, "engine", own, after, lease=worker.name, environ=environ)

    def _write_targets(self) -> None:
        """Write the file that lists all metrics endpoints. Raises `ConfigError` for a port that is taken."""
        host = self._settings.metrics.host
        ports = {
            **{("worker", worker.name): worker.metrics_port for worker in self.workers},
            **{(name.partition("-")[0], name): own.port for name, own in self._metrics.items()},
        }
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

    async def _start_nats(self) -> None:
        wanted = self.nats.port
        port = free_port(wanted)
        if port != wanted and wanted not in (0, NatsSettings().port):
            raise ConfigError(f"--nats-port {wanted} is taken: choose another one, or 0 for a free one")
        if port != wanted and wanted:
            _log.warning("nats_port_taken", wanted=wanted, used=port)
        monitor = free_port(0)
        config = nats_server.write_config(self._data / "nats", port, monitor_port=monitor)
        traced = ["-D"] if self._settings.log.level == "debug" else []
        command = [nats_server.binary(), "-c", str(config), *traced]
        # SIGTERM lets the server finish its writes; SIGINT would too.
        server = Child("nats-server", command, log_file=str(self._data / "nats" / "nats-server.log"))
        self._children.add(server)
        await nats_server.wait_until_up(port)
        store = self._data / "nats" / "jetstream"
        self._keepers.append(asyncio.create_task(watch_store(monitor, store, server.restart), name="store"))
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
                stop_timeout_s=self._settings.drain_timeout + STOP_MARGIN_S,
            ),
            is_worker=command == "engine",
        )

    async def ready(self) -> None:
        """Wait until the edge serves with every worker; prints progress."""
        started = printed = time.monotonic()
        while True:
            health = await _health(self.probe_url)
            joined = sum(health.get("workers", {}).values())
            if health.get("status") == "ok" and joined >= len(self.workers):
                self._children.was_ready = True
                return
            now = time.monotonic()
            if now - printed >= PROGRESS_S:
                printed = now
                what = "edge and router" if not health else f"workers ({joined} of {len(self.workers)})"
                if logs.is_json():
                    _log.info("fleet_waiting", waits_for=what, seconds=round(now - started, 1))
                else:
                    print(f"  waiting for {what}, {now - started:.0f} s …", file=sys.stderr, flush=True)
            await asyncio.sleep(READY_POLL_S)

    @property
    def authenticates(self) -> bool:
        """True if clients must show a credential."""
        return self._settings.auth.mode != "none"

    def pid(self, name: str) -> int:
        """Process id of a child, 0 while it is down."""
        return self._children.pid(name)

    @property
    def failure(self) -> "asyncio.Future[str]":
        """See `ChildGroup.failure`."""
        return self._children.failure

    async def model(self) -> ModelCard:
        """The card of a model that its workers serve: earlier runs may have left others."""
        assert self._client is not None
        cards = CardTable(JetStreamTable(self._client, subjects.card_bucket(self.nats.namespace)))
        leases = await LeaseTable(
            JetStreamTable(self._client, subjects.lease_bucket(self.nats.namespace))
        ).read_all()
        live = {one.pool for one in leases if one.kind == "worker"}
        return min(await cards.models(), key=lambda card: (card.pool not in live, card.name))

    @property
    def probe_url(self) -> str:
        """The edge's metrics port: its own may demand TLS and keys."""
        own = self._metrics["edge-0"]
        return f"http://{host_port(reachable(own.host), own.port)}"

    async def stop(self) -> None:
        """End every process, in order."""
        for task in self._keepers:
            task.cancel()
        await self._children.stop("admin", "console", "edge")
        await self._children.stop_workers()
        # What the tracer has not sent is sent by the next one.
        await self._children.stop("router", "tracer")
        if self._client is not None and not self._client.is_closed:
            await self._client.close()
        # The server.
        await self._children.stop()
        if self._spawner is not None:
            self._spawner.close()
        self._held.close()


async def up(settings: LocalFleetSettings, stop: asyncio.Event, spawner: Spawner | None = None) -> int:
    """Run a fleet until stopped. Exit code 1 if a process cannot be kept alive."""
    began = time.monotonic()
    fleet = LocalFleet(settings, spawner)
    waiting = asyncio.ensure_future(stop.wait())
    try:
        if logs.is_json():
            _log.info("fleet_starting", workers=plan.described(fleet.workers))
        else:
            print(f"starting {plan.described(fleet.workers)} …", file=sys.stderr, flush=True)
        ends: set[asyncio.Future[Any]] = {waiting, fleet.failure}
        starting = asyncio.create_task(fleet.start(), name="start")
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready = asyncio.create_task(fleet.ready(), name="ready")
            await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                _greet(fleet, await fleet.model(), time.monotonic() - began)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
        await cancel_all([starting])
        if fleet.failure.done():
            logs.say(fleet.failure.result(), failed=True)
            return 1
        if logs.is_json():
            _log.info("fleet_stopping")
        else:
            print("stopping: finishing in-flight requests …", file=sys.stderr, flush=True)
        return 0
    except EngineInterrupted:
        return 0
    finally:
        waiting.cancel()
        with contextlib.suppress(LogError):
            await fleet.stop()


def _greet(fleet: LocalFleet, card: ModelCard, seconds: float) -> None:
    """Say that the fleet is ready, and where."""
    url, nats = f"{fleet.url}/v1", without_secret(fleet.nats.url)
    if logs.is_json():
        _log.info(
            "fleet_ready",
            url=url,
            model=card.name,
            nats=nats,
            console=fleet.console_url,
            seconds=round(seconds, 1),
        )
        return
    console = f"console: {fleet.console_url}\n" if fleet.console_url else ""
    key = " -H 'authorization: Bearer KEY'" if fleet.authenticates else ""
    print(
        f"headwater is ready at {url} after {seconds:.1f} s (model {card.name}, NATS {nats})\n"
        f"{console}try: curl -N {url}/{example_request(card, key)}",
        flush=True,
    )


async def _health(url: str) -> dict[str, Any]:
    """The body of /health, empty while nothing answers."""
    address = url.removeprefix("http://")
    try:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(*split_host_port(address))
            try:
                writer.write(f"GET /health HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n".encode())
                answer = await reader.read()
            finally:
                writer.close()
        return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=dict[str, Any])
    except (OSError, ValueError, TimeoutError):
        return {}


def start_spawner(main: Main) -> Spawner:
    """Import what the fleet's processes run and fork the process that starts them. Call it before any event loop.

    `main` runs a command line.
    """
    from headwater.ops.console import process  # noqa: F401
    from headwater.ops.process import actor, edge  # noqa: F401
    from headwater.ops.start import engine  # noqa: F401

    actor.compile_kernels()
    return Spawner.fork(main)
