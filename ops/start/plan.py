"""The workers of one machine: names, roles, ports and GPUs, planned in one place."""

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.persistence import Ports
from headwater.engines import native_arguments, registry
from headwater.engines.engine import Engine
from headwater.engines.ranked import RankedEngine, split
from headwater.engines.sglang import config as sglang_arguments
from headwater.engines.vllm import VllmOptions, config
from headwater.ops.config.processes import EngineProcess, engine_options
from headwater.ops.config.setting import ConfigError
from headwater.ops.config.sources import NATIVE
from headwater.ops.config.worker import WITH_OPTIONS, EngineOptions, FleetSettings, section_of
from headwater.ops.process.actor import EXIT_UNRECOVERABLE, Host
from headwater.ops.process.sockets import free_range
from headwater.ops.start import tensorrt_llm
from headwater.schemas.events.fleet import Role

DEFAULT_WORKERS = 2

DEVICES = "CUDA_VISIBLE_DEVICES"


class WorkerPlan(NamedTuple):
    """One worker of this machine. Port 0: none. Empty `gpus`: all, in the system's order."""

    name: str
    role: Role
    metrics_port: int = 0
    nixl_port: int = 0
    gpus: tuple[str, ...] = ()
    engine: str = "vllm"


def names(settings: EngineProcess) -> list[tuple[str, Role]]:
    """Name and role of each worker: those of `--engine`, then SGLang's. The name of a process with several workers is the beginning of theirs."""
    before = f"{settings.name}-" if settings.name else ""
    added: list[tuple[str, Role]] = [
        (f"{before}sglang-{number}", "both") for number in range(settings.fleet.added.sglang_workers)
    ]
    return [*_own_names(settings), *added]


def _own_names(settings: EngineProcess) -> list[tuple[str, Role]]:
    fleet, role = settings.fleet, settings.worker.role
    roles = fleet.prefill_workers or fleet.decode_workers
    if fleet.encode_workers and not registry.traits_of(settings.worker.engine).encoder:
        able = sorted(name for name, traits in registry.all_traits().items() if traits.encoder)
        raise ConfigError(
            f"--encode-workers requires --engine {', '.join(able[:-1])} or {able[-1]}, not {settings.worker.engine}"
        )
    both = fleet.workers or (0 if roles else DEFAULT_WORKERS)
    if both == 1 and settings.name:
        own: list[tuple[str, Role]] = [(settings.name, role)]
    else:
        kind = settings.name or ("worker" if role == "both" else role)
        own = [(f"{kind}-{number}", role) for number in range(both)]
    if role != "both" and roles:
        raise ConfigError(
            f"--role {role} is the role of --workers; leave it out with --prefill-workers and --decode-workers"
        )
    before = f"{settings.name}-" if settings.name else ""
    return [
        *own,
        *((f"{before}prefill-{number}", "prefill") for number in range(fleet.prefill_workers)),
        *((f"{before}decode-{number}", "decode") for number in range(fleet.decode_workers)),
        *((f"{before}encode-{number}", "encode") for number in range(fleet.encode_workers)),
    ]


def plan(settings: EngineProcess, *, devices: Sequence[str] = ()) -> list[WorkerPlan]:
    """All workers of this machine. `devices` are its GPUs, in order; none on CPU.

    Each worker sees all GPUs, its own first. UCX opens memory on another worker's GPU in either case (seen with NIXL
    1.5.1); other transports may require that the GPU is visible. Raises `ConfigError` if there are too few.
    """
    found = names(settings)
    added = settings.fleet.added.sglang_workers
    engines: list[str] = [settings.worker.engine] * (len(found) - added) + ["sglang"] * added
    vllm, metrics_port = settings.engines.vllm, settings.metrics.port
    ranks = ranks_here(vllm.native)
    nixl = vllm.nixl_port
    if not nixl and settings.worker.engine == "vllm" and any(_needs_nixl(vllm, role) for _, role in found):
        nixl = free_range(len(found) * ranks, vllm.nixl_host)
    needed = [_gpus(settings, engine) for engine in engines]
    if devices and sum(needed) > len(devices):
        each = " and ".join(map(str, sorted(set(needed))))
        raise ConfigError(
            f"{len(found)} workers with {each} GPUs each need {sum(needed)}, and {len(devices)} are visible: "
            "start fewer workers, or make --gpus-per-worker or the tensor-parallel size smaller"
        )
    first = [sum(needed[:number]) for number in range(len(found))]
    return [
        WorkerPlan(
            name,
            role,
            metrics_port + number if metrics_port else 0,
            nixl + number * ranks if nixl and engine == "vllm" else 0,
            (*devices[first[number] :], *devices[: first[number]]),
            engine,
        )
        for number, ((name, role), engine) in enumerate(zip(found, engines, strict=True))
    ]


def _gpus(settings: EngineProcess, engine: str) -> int:
    if engine == "tensorrt_llm":
        return tensorrt_llm.gpus(settings)
    if engine != "sglang":
        return settings.engines.vllm.gpus_per_worker or gpus_needed(settings.engines.vllm.native)
    words = settings.engines.sglang.native
    parts = sglang_arguments.number(words, "tp_size", 1) * sglang_arguments.number(words, "pp_size", 1)
    # With it the ranks share the GPUs of the tensor-parallel parts.
    shared = native_arguments.has(words, "enable_dp_attention")
    ranks = 1 if shared else sglang_arguments.number(words, "dp_size", 1)
    return settings.engines.sglang.gpus_per_worker or parts * ranks


def of_worker(settings: EngineProcess, worker: WorkerPlan) -> EngineProcess:
    """The settings of one worker's process."""
    return settings._replace(
        name=worker.name,
        fleet=FleetSettings(workers=1),
        worker=settings.worker._replace(
            role=worker.role,
            engine=worker.engine,
            reads_embeddings=settings.worker.reads_embeddings
            or settings.worker.accept_image_embeds
            or settings.fleet.encode_workers > 0,
        ),
        engines=settings.engines._replace(vllm=settings.engines.vllm._replace(nixl_port=worker.nixl_port)),
        metrics=settings.metrics._replace(port=worker.metrics_port),
    )


def apart(settings: EngineProcess) -> tuple[EngineProcess, list[str]]:
    """The settings of one engine's process without those of other engines, and the words after them: its own arguments."""
    engine, native = settings.worker.engine, native_words(settings)
    options = engine_options(settings, engine)
    if native:
        options = options._replace(native=())
    own = {section_of(engine): options} if section_of(engine) in WITH_OPTIONS else {}
    kept = settings._replace(engines=EngineOptions()._replace(**own))
    return kept, ["--", *native] if native else []


def without_sglang(settings: EngineProcess) -> EngineProcess:
    """The settings of the other workers."""
    return settings._replace(fleet=settings.fleet._replace(added=FleetSettings().added))


def native_words(settings: EngineProcess) -> tuple[str, ...]:
    """The engine's own arguments."""
    options = engine_options(settings, settings.worker.engine)
    native: tuple[str, ...] = getattr(options, NATIVE, ())
    return native


def described(workers: Sequence[WorkerPlan]) -> str:
    """Return how many workers of which engines: "2 vllm worker(s) and 1 sglang worker(s)"."""
    engines = [registry.find(worker.engine).name for worker in workers]
    counts = {name: engines.count(name) for name in engines}
    return " and ".join(f"{count} {name} worker(s)" for name, count in counts.items())


def uses_gpus(settings: EngineProcess, *, cpu: bool) -> bool:
    """Do these workers use GPUs, if there are any? `cpu`: the vLLM that is installed here computes on CPUs."""
    traits = registry.traits_of(settings.worker.engine)
    own = traits.loads != "nothing" and not (traits.cpu_build and cpu)
    return own or bool(settings.fleet.added.sglang_workers)


def ranks_here(native: Sequence[str]) -> int:
    """Data-parallel ranks that one worker runs on this machine, from vLLM's arguments: each has a side channel."""
    size = config.number(native, "data_parallel_size", 1)
    return max(1, config.number(native, "data_parallel_size_local", size))


def gpus_needed(native: Sequence[str]) -> int:
    """GPUs of one worker, from vLLM's arguments: all parts of the model, for each rank."""
    parts = config.number(native, "tensor_parallel_size", 1)
    # Context parallelism of the decode shares the GPUs of the tensor-parallel parts.
    parts *= config.number(native, "prefill_context_parallel_size", 1)
    return parts * config.number(native, "pipeline_parallel_size", 1) * ranks_here(native)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that workers may use: those in CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    if DEVICES in environ:
        return tuple(name.strip() for name in environ[DEVICES].split(",") if name.strip())
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        listed = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(map(str, range(count)))


def _needs_nixl(vllm: VllmOptions, role: Role) -> bool:
    if role == "encode":
        return False
    if vllm.connector:
        return "nixl" in vllm.connector
    return role != "both" or "nixl" in (config.value(vllm.native, "kv_transfer_config") or "").lower()


# The data-parallel ranks of an engine in one process: a worker for each, that live and end together.

Run = Callable[..., Awaitable[int]]
"""`run_actor`'s way to run one actor with ports of its own: settings, kind, name, make, stop, restarts."""

Make = Callable[[Ports, str, Engine], Awaitable[Actor]]
"""Makes the worker of one rank: its ports, its name, its engine."""


def has_ranks(engine: Engine) -> TypeGuard[RankedEngine]:
    """Is it an engine of several ranks?"""
    return getattr(engine, "ranks", 1) > 1


def rank_name(worker: str, number: int) -> str:
    """Name of the worker that stands for one rank."""
    return f"{worker}-dp{number}"


async def run_ranks(
    host: Host, worker: str, engine: RankedEngine, make: Make, stop: asyncio.Event, run: Run
) -> int:
    """All ranks until stopped, or until one of them ends: then the others end too, as their engine is the same.

    Each has a connection, a lease and a name of its own; `make` gives it the worker's name as its instance. Returns
    the exit status, the worst of them.
    """
    ending = asyncio.Event()

    async def one(number: int, rank: Engine) -> int:
        name = rank_name(worker, number)
        # One server of metrics for the process.
        own = host if number == 0 else host._replace(metrics=host.metrics._replace(port=0))

        async def make_it(ports: Ports) -> Actor:
            return await make(ports, name, rank)

        try:
            return await run(own, "worker", name, make_it, ending, restarts=False)
        finally:
            ending.set()

    async def pass_on() -> None:
        await stop.wait()
        ending.set()

    watcher: asyncio.Task[Any] = asyncio.create_task(pass_on(), name="stop watcher")
    try:
        async with asyncio.TaskGroup() as group:
            ranks = [
                group.create_task(one(*pair), name=rank_name(worker, pair[0]))
                for pair in enumerate(split(engine))
            ]
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    codes = [task.result() for task in ranks]
    return EXIT_UNRECOVERABLE if EXIT_UNRECOVERABLE in codes else max(codes)
