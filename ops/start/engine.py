"""One engine as a process: its worker, or one worker per data-parallel rank."""

import asyncio
import contextlib
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard

import structlog

from headwater.actors.runtime.actor import Actor, Unrecoverable
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.actor import WorkerActor
from headwater.actors.worker.inflight import WorkerCollector
from headwater.actors.worker.lora import LoraSettings
from headwater.actors.worker.lora_slots import RestartList
from headwater.engines import logs, registry
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.lora_cache import LoraCache, LoraError, LoraPolicy
from headwater.engines.lora_sources import parse_networks, parse_sources
from headwater.engines.ranked import RankedEngine, split
from headwater.engines.transfer import media_transfer, open_transfer
from headwater.engines.transfer.port import TransferUnavailable
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.setting import ConfigError, cache_folder
from headwater.ops.diagnosis import explain_engine_log, log_findings
from headwater.ops.start import metrics_folder, plan
from headwater.ops.start.actor import EXIT_UNRECOVERABLE, Host, run_one
from headwater.schemas.names import slug


def adapters_of(settings: EngineProcess, worker: str) -> LoraSettings:
    """Return how the worker of this name handles adapters. Raises `ConfigError`."""
    lora = settings.lora
    try:
        policy = LoraPolicy(
            parse_sources(lora.sources),
            parse_networks(lora.networks),
            lora.max_mib << 20,
            cache_bytes_max=lora.cache_mib << 20,
        )
    except LoraError as error:
        raise ConfigError(f"--lora-sources, --lora-networks: {error}") from error
    if not policy.sources:
        if lora.loading.on_demand:
            raise ConfigError(
                "--lora-on-demand needs --lora-sources: give the locations that adapters may come from"
            )
        return LoraSettings()
    cache = cache_folder(settings.cache_dir)
    # Without a cache folder adapters live as long as the machine's temporary files.
    root = cache / "adapters" if cache else Path(tempfile.mkdtemp(prefix="headwater-adapters-"))
    names = cache / "adapters" / ".workers" / f"{settings.nats.namespace}.{worker}.json" if cache else None
    return LoraSettings(LoraCache(root, policy), lora.loading, settings.drain_timeout, RestartList(names))


HOST_CHARACTERS_MAX: Final = 45
"""The longest part of a host's name in a worker's: with a random part and a data-parallel rank, a name has at most 64 characters."""


def unique_name() -> str:
    """The end of this host's name, by which replicas differ, and a random part: containers share process ids, and some share names."""
    host = slug(socket.gethostname())[-HOST_CHARACTERS_MAX:].lstrip("-_") or "host"
    return f"{host}-{secrets.token_hex(4)}"


_log = structlog.get_logger("headwater.main")


async def _check_against_fleet(ports: Ports, settings: EngineProcess, model: str) -> None:
    """Does the engine fit the fleet that it joins? Raises `Unrecoverable`: it would not fit after a restart either."""
    try:
        await plan.against_fleet(ports, settings, model)
    except EngineUnavailable as error:
        _log.error("engine_cannot_start", reason=str(error))
        raise Unrecoverable(str(error)) from error


async def run_engine(settings: EngineProcess, stop: asyncio.Event) -> int:
    """Run one engine until stopped or until it dies: then the process ends, and its supervisor starts another."""
    worker_settings, traits = settings.worker, registry.traits_of(settings.worker.engine)
    name = settings.name or unique_name()
    logs.describe(kind="worker", worker=name)
    try:
        engine, served = plan.make_engine(settings, name)
        media = settings.media_transfer
        media_transfer(name, media.mib, media.transport)
    except (EngineUnavailable, TransferUnavailable) as error:
        _log.error("engine_cannot_start", reason=str(error))
        log_findings(explain_engine_log(str(error), f"worker {name}"))
        return EXIT_UNRECOVERABLE
    actors: list[WorkerActor] = []

    async def make(ports: Ports, worker: str = name, started_engine: Engine = engine) -> Actor:
        await _check_against_fleet(ports, settings, served.name)
        actor = WorkerActor(
            ports,
            worker,
            started_engine,
            served,
            drain_s=settings.drain_timeout,
            profile=plan.profile_of(settings, name),
            lora=adapters_of(settings, worker),
            health=settings.health,
            open_transfer=partial(open_transfer, worker, worker_settings.embeddings.mib, traits.transport),
            open_media_transfer=media_transfer(worker, media.mib, media.transport),
        )
        actors.append(actor)
        return actor

    def labels() -> dict[str, str]:
        actor = actors[0] if actors else None
        pool = str(actor.stats().get("pool", "")) if actor else ""
        role = actor.status.role if actor else worker_settings.profile.role
        return {"worker": name, "pool": pool, "role": role, "rank": "0"}

    collector = WorkerCollector(lambda: [(actor.name, actor.stats) for actor in list(actors)])

    host = Host(settings.nats, settings.metrics, settings.cache_dir, settings.streams)

    async def run() -> int:
        if has_ranks(engine):
            return await run_ranks(host, name, engine, make, stop, partial(run_one, collector=collector))
        return await run_one(
            host, "worker", name, make, stop, restarts=False, labels=labels, collector=collector
        )

    if traits.writes_metric_files and settings.metrics.port:
        with metrics_folder.per_life():
            return await run()
    return await run()


# The data-parallel ranks of an engine in this process: a worker for each, that live and end together.

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
        rank_host = host if number == 0 else host._replace(metrics=host.metrics._replace(port=0))

        async def make_it(ports: Ports) -> Actor:
            return await make(ports, name, rank)

        try:
            return await run(rank_host, "worker", name, make_it, ending, restarts=False)
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
