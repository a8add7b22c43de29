"""The workers of one machine: names, roles, ports and GPUs, planned in one place, and checked before an engine loads anything.

The engine of each is made here, too, from settings with the model that it serves.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.actors.worker.model_card import Served, check_block_size
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines import native_arguments, registry
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.launcher import EngineLauncher, PortRange, WorkerSpec, launcher_of
from headwater.engines.model_files import ModelFiles, read_chat_template
from headwater.events.jetstream.connection import address_towards_any
from headwater.ops.config.processes import (
    EngineProcess,
    added_engines,
    engine_options,
    with_engine_options,
    with_own_common,
)
from headwater.ops.config.sections import engine_traces
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.sources import NATIVE
from headwater.ops.config.worker import EngineOptions, FleetSettings
from headwater.ops.start import model as start_model
from headwater.ops.start.model_source import DEMO_NAME
from headwater.ops.start.sockets import free_range, is_own
from headwater.schemas.events import Role
from headwater.schemas.names import LOOPBACK, WILDCARDS

DEFAULT_WORKERS = 2


class WorkerPlan(NamedTuple):
    """One worker of this machine. Port 0: none. Empty `gpus`: all, in the system's order."""

    name: str
    role: Role
    metrics_port: int = 0
    side_port: int = 0
    gpus: tuple[str, ...] = ()
    engine: str = registry.DEFAULT_ENGINE


def names(settings: EngineProcess) -> list[tuple[str, Role]]:
    """Name and role of each worker: those of `--engine`, then those of other engines. The name of a process with several workers is the beginning of theirs."""
    return [(name, role) for name, role, _ in _named(settings)]


def _named(settings: EngineProcess) -> list[tuple[str, Role, str]]:
    before = f"{settings.name}-" if settings.name else ""
    return [
        *((name, role, settings.worker.engine) for name, role in _own_names(settings)),
        *(
            (f"{before}{engine}-{number}", "both", engine)
            for engine, count in added_engines(settings.fleet).items()
            for number in range(count)
        ),
    ]


def _own_names(settings: EngineProcess) -> list[tuple[str, Role]]:
    fleet, role = settings.fleet, settings.worker.profile.role
    roles = fleet.prefill_workers or fleet.decode_workers
    if fleet.encode_workers and not registry.traits_of(settings.worker.engine).encoder:
        able = sorted(name for name, traits in registry.all_traits().items() if traits.encoder)
        raise ConfigError(
            f"--encode-workers requires --engine {', '.join(able[:-1])} or {able[-1]}, not {settings.worker.engine}"
        )
    both = fleet.workers or (0 if roles else DEFAULT_WORKERS)
    if both == 1 and settings.name:
        own_names: list[tuple[str, Role]] = [(settings.name, role)]
    else:
        kind = settings.name or ("worker" if role == "both" else role)
        own_names = [(f"{kind}-{number}", role) for number in range(both)]
    if role != "both" and roles:
        raise ConfigError(
            f"--role {role} is the role of --workers; leave it out with --prefill-workers and --decode-workers"
        )
    before = f"{settings.name}-" if settings.name else ""
    return [
        *own_names,
        *((f"{before}prefill-{number}", "prefill") for number in range(fleet.prefill_workers)),
        *((f"{before}decode-{number}", "decode") for number in range(fleet.decode_workers)),
        *((f"{before}encode-{number}", "encode") for number in range(fleet.encode_workers)),
    ]


def with_endpoint(settings: EngineProcess, endpoint: str) -> EngineProcess:
    """The settings of workers that are beside the edge at this address, unless they name another."""
    worker_settings = settings.worker
    if worker_settings.profile.endpoint:
        return settings
    return settings._replace(
        worker=worker_settings._replace(profile=worker_settings.profile._replace(endpoint=endpoint))
    )


def launcher_for(settings: EngineProcess, engine: str = "") -> EngineLauncher[Any]:
    """The launcher of an engine, "": of `--engine`, with its options. Raises `EngineUnavailable`."""
    engine = engine or settings.worker.engine
    return launcher_of(engine, engine_options(settings, engine))


def spec_of(settings: EngineProcess, name: str, role: Role | None = None, side_port: int = 0) -> WorkerSpec:
    """Return what an engine is told of a worker of this name; `role` is that of the settings unless given."""
    worker_settings = settings.worker
    role = role or worker_settings.profile.role
    return WorkerSpec(
        name,
        role,
        worker_settings.model,
        worker_settings.served_model_name,
        worker_settings.block_size,
        worker_settings.max_model_len,
        reads_embeddings=worker_settings.embeddings.read and role in ("both", "prefill"),
        accepts_embeddings=worker_settings.accept_image_embeds and role == "both",
        embeddings_mib=worker_settings.embeddings.mib,
        exports_metrics=bool(settings.metrics.port),
        online=any(source.startswith("hf://") for source in settings.lora.sources),
        side_port=side_port,
        traces=engine_traces(settings.trace),
    )


def profile_of(settings: EngineProcess, name: str) -> WorkerProfile:
    """Return what a worker tells the fleet of itself; `name` is that of its engine, whose ranks are workers of their own."""
    own = settings.worker
    return own.profile._replace(instance=name, embedding_format=own.embeddings.format)


def gpus_needed(settings: EngineProcess) -> int:
    """GPUs of all these workers, if their engines use any."""
    return sum(launcher_for(settings, engine).gpus() for _, _, engine in _named(settings))


def plan(settings: EngineProcess, *, devices: Sequence[str] = ()) -> list[WorkerPlan]:
    """All workers of this machine. `devices` are its GPUs, in order; none on CPU.

    Each worker sees all GPUs, its own first. UCX opens memory on another worker's GPU in either case (seen with NIXL
    1.5.1); other transports may require that the GPU is visible. Raises `ConfigError` if there are too few, and `EngineUnavailable` for an
    address that workers elsewhere could not reach.
    """
    named = _named(settings)
    launchers = {
        engine: launcher_for(settings, engine) for engine in dict.fromkeys(entry[2] for entry in named)
    }
    gpus = {engine: launcher.gpus() for engine, launcher in launchers.items()}
    needed = [gpus[engine] for _, _, engine in named]
    if devices and sum(needed) > len(devices):
        each = " and ".join(map(str, sorted(set(needed))))
        raise ConfigError(
            f"{len(named)} workers with {each} GPUs each need {sum(needed)}, and {len(devices)} are visible: "
            "start fewer workers, or make --gpus-per-worker or the tensor-parallel size smaller"
        )
    first = [sum(needed[:number]) for number in range(len(named))]
    check_meeting_places(
        settings, sorted({role for _, role, engine in named if launchers[engine].is_met(role)})
    )
    sides = [launchers[engine].side_ports(role) for _, role, engine in named]
    side_port = settings.worker.handoff_port
    if any(sides) and not side_port:
        side_port = free_range(sum(sides), settings.worker.handoff_host or LOOPBACK)
    metrics_port = settings.metrics.port
    return [
        WorkerPlan(
            name,
            role,
            metrics_port + number if metrics_port else 0,
            side_port + sum(sides[:number]) if sides[number] else 0,
            (*devices[first[number] :], *devices[: first[number]]),
            engine,
        )
        for number, (name, role, engine) in enumerate(named)
    ]


def of_worker(settings: EngineProcess, worker: WorkerPlan) -> EngineProcess:
    """The settings of one worker's process, without those that only others of its fleet use."""
    is_met = launcher_for(settings, worker.engine).is_met(worker.role)
    return settings._replace(
        name=worker.name,
        fleet=FleetSettings(workers=1),
        worker=settings.worker._replace(
            profile=settings.worker.profile._replace(role=worker.role),
            engine=worker.engine,
            handoff_host=settings.worker.handoff_host if is_met else "",
            handoff_port=worker.side_port,
            embeddings=settings.worker.embeddings._replace(
                read=settings.worker.embeddings.read
                or settings.worker.accept_image_embeds
                or settings.fleet.encode_workers > 0
            ),
        ),
        metrics=settings.metrics._replace(port=worker.metrics_port),
    )


def apart(settings: EngineProcess) -> tuple[EngineProcess, list[str]]:
    """The settings of one engine's process without those of other engines, and the words after them: its own arguments."""
    engine, native = settings.worker.engine, native_words(settings)
    options = engine_options(settings, engine)
    process_settings = with_engine_options(
        settings._replace(engines=EngineOptions(), worker=with_own_common(settings.worker, engine)),
        engine,
        options._replace(**{NATIVE: ()}) if native else options,
    )
    return process_settings, ["--", *native] if native else []


def without_added(settings: EngineProcess) -> EngineProcess:
    """The settings of the workers of `--engine`."""
    return settings._replace(fleet=settings.fleet._replace(added=FleetSettings().added))


def native_words(settings: EngineProcess) -> tuple[str, ...]:
    """The engine's own arguments."""
    words: tuple[str, ...] = getattr(engine_options(settings, settings.worker.engine), NATIVE, ())
    return words


def described(workers: Sequence[WorkerPlan]) -> str:
    """Return how many workers of which engines: "2 a worker(s) and 1 b worker(s)"."""
    engines = [registry.find(worker.engine).name for worker in workers]
    counts = {name: engines.count(name) for name in engines}
    return " and ".join(f"{count} {name} worker(s)" for name, count in counts.items())


def uses_gpus(settings: EngineProcess) -> bool:
    """Do these workers use GPUs, if there are any?"""
    return any(
        registry.traits_of(engine).loads != "nothing" and not launcher_for(settings, engine).computes_on_cpu()
        for engine in (settings.worker.engine, *added_engines(settings.fleet))
    )


# Checks before an engine loads anything: settings against each other, and against the running fleet.

LEAST_PORT, MOST_PORT = 1024, 65535

HANDOFF_HOST: Final = "--handoff-host"
HANDOFF_PORT: Final = "--handoff-port"
"""The flags that say where the engines of other workers reach those of this machine."""

LOOK_S: Final = 5.0

T = TypeVar("T")

_log = structlog.get_logger("headwater.preflight")


def check_plan(settings: EngineProcess, workers: Sequence[WorkerPlan]) -> None:
    """The checks that need neither an engine nor the fleet. Raises `EngineUnavailable`."""
    worker_settings = settings.worker
    start_model.check_names(worker_settings.tool_parser, worker_settings.reasoning_parser)
    if worker_settings.chat_template:
        read_chat_template(worker_settings.chat_template)
    ranges: list[PortRange] = []
    launchers = {worker.engine: launcher_for(settings, worker.engine) for worker in workers}
    for engine, launcher in launchers.items():
        specs = specs_of(settings, [worker for worker in workers if worker.engine == engine])
        launcher.check(specs)
        ranges += launcher.ports(specs)
    for worker in workers:
        if worker.side_port:
            size = launchers[worker.engine].side_ports(worker.role)
            ranges.append(PortRange(HANDOFF_PORT, worker.name, worker.side_port, size))
        if worker.metrics_port:
            ranges.append(PortRange("--metrics-port", worker.name, worker.metrics_port))
    check_ports(ranges)
    check_handoff_settings(settings, workers)


def check_handoff_settings(settings: EngineProcess, workers: Sequence[WorkerPlan]) -> None:
    """Refuse an address or a port for hand-offs that none of these workers has a use for. Raises `EngineUnavailable`."""
    own = settings.worker
    kinds = list(dict.fromkeys((worker.engine, worker.role) for worker in workers))
    launchers = [(launcher_for(settings, engine), role) for engine, role in kinds]
    for flag, value, is_used in (
        (HANDOFF_HOST, own.handoff_host, any(launcher.is_met(role) for launcher, role in launchers)),
        (HANDOFF_PORT, own.handoff_port, any(launcher.side_ports(role) for launcher, role in launchers)),
    ):
        if value and kinds and not is_used:
            who = " and ".join(f"{engine} workers with role {role}" for engine, role in kinds)
            raise EngineUnavailable(f"{flag} {value} is not used by {who}: leave it out")


def check_meeting_places(settings: EngineProcess, roles: Sequence[Role]) -> None:
    """Check that workers elsewhere may reach the engines of workers of these roles, from which they fetch KV. Raises `EngineUnavailable`."""
    host = settings.worker.handoff_host
    if not roles:
        return
    if host and host in WILDCARDS:
        raise EngineUnavailable(
            f"{HANDOFF_HOST} {host}: other workers are told this address: give one that they reach"
        )
    if host and not is_own(host):
        raise EngineUnavailable(
            f"{HANDOFF_HOST} {host}: it is no address of this machine, which has to listen there"
        )
    own_address = "" if host else address_towards_any(settings.nats.address.split(","))
    if own_address:
        raise EngineUnavailable(
            f"{HANDOFF_HOST} is missing: NATS is on another machine, so workers may be on others, and they fetch KV from a {roles[0]} worker at "
            f"this address. Give {own_address}, from which NATS is reached, or {LOOPBACK} if all workers of the pool run on this machine"
        )


def specs_of(settings: EngineProcess, workers: Iterable[WorkerPlan]) -> list[WorkerSpec]:
    """Return what an engine is told of planned workers."""
    return [spec_of(settings, worker.name, worker.role, worker.side_port) for worker in workers]


def check_ports(ranges: Iterable[PortRange]) -> None:
    """Check that all are within 1024 to 65535, and that none overlap. Raises `EngineUnavailable`."""
    taken_ranges: list[PortRange] = []
    for port_range in sorted(ranges, key=lambda entry: entry.first):
        last = port_range.first + port_range.size - 1
        port_label = (
            f"port {port_range.first}" if port_range.size == 1 else f"ports {port_range.first} to {last}"
        )
        if port_range.first < LEAST_PORT or last > MOST_PORT:
            raise EngineUnavailable(
                f"{port_range.flag} {port_range.first}: {port_range.owner} would use {port_label}, and only {LEAST_PORT} to {MOST_PORT} "
                f"are valid; choose one up to {MOST_PORT - port_range.size + 1}"
            )
        before = taken_ranges[-1] if taken_ranges else None
        if before is not None and port_range.first < before.first + before.size:
            raise EngineUnavailable(
                f"{port_range.flag} {port_range.first}: {port_range.owner} would use {port_label}, which {before.owner} uses "
                f"({before.flag} {before.first}, {before.size} from there); move one of them by "
                f"{before.first + before.size - port_range.first} or more"
            )
        taken_ranges.append(port_range)


async def against_fleet(ports: Ports, settings: EngineProcess, model: str) -> None:
    """Compare with the model cards of pools that have workers now, before a model is loaded; `model` is the name that clients use.

    Raises `EngineUnavailable`.
    """
    launcher, spec = launcher_for(settings), spec_of(settings, settings.name)
    cards = await _read(CardTable(ports.cards).models)
    leases = await _read(LeaseTable(ports.leases).read_all)
    live = {lease.pool: lease.name for lease in leases if lease.kind == "worker"}
    if size := launcher.known_block_size(spec):
        check_block_size(model, size, cards, live)
    launcher.check_fleet(spec, model, cards, set(live))


async def _read(read: Callable[[], Awaitable[list[T]]]) -> list[T]:
    """The rows of a table; waits while the store does not answer."""
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                return await read()
        except TimeoutError:
            _log.warning(
                "fleet_awaited", reason=f"the lease and card tables did not answer within {LOOK_S:.0f} s"
            )


# The engine of a worker, and its model.


def make_engine(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    """An engine (not started) and its model. Raises `EngineUnavailable`."""
    worker_settings = settings.worker
    takes = registry.traits_of(
        worker_settings.engine
    ).takes_embeddings and worker_settings.profile.role not in ("prefill", "decode")
    if worker_settings.accept_image_embeds and not takes:
        able = sorted(name for name, traits in registry.all_traits().items() if traits.takes_embeddings)
        raise EngineUnavailable(
            f"--accept-image-embeds: {worker_settings.engine} workers of role {worker_settings.profile.role} cannot take embeddings from clients; those of "
            f"{' and '.join(able)} that serve whole requests can"
        )
    launcher, spec = launcher_for(settings), with_model(settings, spec_of(settings, worker))
    files = _read_files(launcher, spec, worker_settings.chat_template)
    detected = start_model.find(worker_settings.tool_parser, worker_settings.reasoning_parser, files)
    served = Served(
        worker_settings.served_model_name or files.name,
        files,
        worker_settings.model_aliases,
        tool_parser=detected.tool_format,
        reasoning_parser=detected.reasoning_format,
        migrations_max=worker_settings.migration_limit,
    )
    return launcher.make(spec, files), served


def with_model(settings: EngineProcess, spec: WorkerSpec) -> WorkerSpec:
    """The worker with the folder of its model, if the engine loads one or one is named. Raises `EngineUnavailable`."""
    loads = registry.traits_of(settings.worker.engine).loads
    if loads == "weights" or (loads == "nothing" and spec.model):
        return spec._replace(model=str(model_folder(spec.model)))
    return spec


def model_folder(model: str) -> Path:
    """The folder that `--model` names; the small default model is created on first use."""
    if not model or model == DEMO_NAME:
        return start_model.ensure()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise EngineUnavailable(f"--model {model}: no such folder")
    return folder


def check_model(settings: EngineProcess) -> None:
    """Check the model's folder before anything is started. Raises `EngineUnavailable`."""
    loads = registry.traits_of(settings.worker.engine).loads
    spec = with_model(settings, spec_of(settings, ""))
    if loads == "nothing" and not spec.model:
        return
    files = _read_files(launcher_for(settings), spec, settings.worker.chat_template)
    if loads == "pipeline":
        return
    # Other formats of weights, or none at all, are checked by the engine.
    weights = loads == "weights" and not native_arguments.has(native_words(settings), "load_format")
    start_model.check(Path(spec.model), files, weights=weights)


def _read_files(launcher: EngineLauncher[object], spec: WorkerSpec, chat_template: str) -> ModelFiles:
    files = launcher.read_files(spec)
    return files._replace(chat_template=read_chat_template(chat_template)) if chat_template else files
