"""Which workers a machine runs: names, roles, ports and GPUs, decided in one place."""

import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm import native
from headwater.ops.config import ConfigError, Settings
from headwater.schemas.fleet import Role

DEFAULT_WORKERS = 2
FREE_FROM, FREE_TO = 20_000, 32_000
"""Where free ports are looked for: below the range from which systems give ports to clients."""

DEVICES = "CUDA_VISIBLE_DEVICES"


class WorkerPlan(NamedTuple):
    """One worker of this machine. Ports are 0 for none, `gpus` empty for all as they come."""

    name: str
    role: Role
    metrics_port: int = 0
    nixl_port: int = 0
    gpus: tuple[str, ...] = ()


def names(settings: Settings) -> list[tuple[str, Role]]:
    """Name and role of each worker."""
    both = settings.workers or (0 if settings.prefill_workers or settings.decode_workers else DEFAULT_WORKERS)
    if both == 1 and settings.name:
        own: list[tuple[str, Role]] = [(settings.name, settings.role)]
    else:
        kind = "worker" if settings.role == "both" else settings.role
        own = [(f"{kind}-{number}", settings.role) for number in range(both)]
    if settings.role != "both" and (settings.prefill_workers or settings.decode_workers):
        raise ConfigError(
            f"--role {settings.role} says what --workers do; beside --prefill-workers and --decode-workers leave it out"
        )
    return [
        *own,
        *((f"prefill-{number}", "prefill") for number in range(settings.prefill_workers)),
        *((f"decode-{number}", "decode") for number in range(settings.decode_workers)),
    ]


def plan(settings: Settings, *, devices: Sequence[str] = ()) -> list[WorkerPlan]:
    """All workers of this machine. `devices` are its GPUs, in order; none on CPU.

    A worker sees them all, its own first. UCX opens memory of another one's GPU either way (seen with NIXL 1.5.1), other
    transports may need to see it. Raises `ConfigError` if there are too few.
    """
    found = names(settings)
    ranks = ranks_here(settings)
    nixl = settings.nixl_port
    if not nixl and settings.engine == "vllm" and any(_needs_nixl(settings, role) for _, role in found):
        nixl = free_range(len(found) * ranks, settings.nixl_host)
    each = settings.gpus_per_worker or gpus_needed(settings)
    if devices and each * len(found) > len(devices):
        raise ConfigError(
            f"{len(found)} workers with {each} GPUs each need {each * len(found)}, and {len(devices)} are visible: "
            "start fewer workers, or make --gpus-per-worker or the tensor-parallel size smaller"
        )
    return [
        WorkerPlan(
            name,
            role,
            settings.metrics_port + number if settings.metrics_port else 0,
            nixl + number * ranks if nixl else 0,
            (*devices[number * each :], *devices[: number * each]),
        )
        for number, (name, role) in enumerate(found)
    ]


def of_worker(settings: Settings, worker: WorkerPlan) -> Settings:
    """The settings of one worker's process."""
    return msgspec.structs.replace(
        settings,
        name=worker.name,
        role=worker.role,
        workers=1,
        prefill_workers=0,
        decode_workers=0,
        metrics_port=worker.metrics_port,
        nixl_port=worker.nixl_port,
    )


def ranks_here(settings: Settings) -> int:
    """Data-parallel ranks that one worker of this machine runs: each has a side channel of its own."""
    size = native.number(settings.native, "data_parallel_size", 1)
    return max(1, native.number(settings.native, "data_parallel_size_local", size))


def gpus_needed(settings: Settings) -> int:
    """GPUs of one worker: all parts of the model, for each rank."""
    parts = native.number(settings.native, "tensor_parallel_size", 1)
    return parts * native.number(settings.native, "pipeline_parallel_size", 1) * ranks_here(settings)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that workers may use: those the user has chosen, else all that the driver lists."""
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


def free_range(count: int, host: str) -> int:
    """The first of `count` ports in a row that can be bound now. Raises `EngineUnavailable`."""
    for _ in range(100):
        first = FREE_FROM + secrets.randbelow(FREE_TO - FREE_FROM - count)
        if all(_is_free(host, first + number) for number in range(count)):
            return first
    raise EngineUnavailable(
        f"no {count} free ports in a row on {host}: give --nixl-port or --metrics-port, or an address of this machine "
        "as --nixl-host or --host"
    )


def _needs_nixl(settings: Settings, role: Role) -> bool:
    if settings.connector:
        return "nixl" in settings.connector
    return role != "both" or "nixl" in (native.value(settings.native, "kv_transfer_config") or "").lower()


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
