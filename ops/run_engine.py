"""One engine as a process: its worker, or a worker for each of its data-parallel ranks."""

import asyncio
import os
import socket
from functools import partial

import structlog

from headwater.actors.actor import Actor
from headwater.actors.engine import EngineActor
from headwater.actors.health import HealthSettings
from headwater.actors.supervisor import Hopeless
from headwater.actors.worker_life import Standing
from headwater.actors.worker_metrics import WorkerCollector
from headwater.actors.world import World
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.ops import adapters, engines, metrics_folder, preflight
from headwater.ops.children import HOPELESS
from headwater.ops.config import Settings
from headwater.ops.run_actor import run_one
from headwater.ops.run_ranks import has_ranks, run_ranks
from headwater.schemas.names import slug

_log = structlog.get_logger("headwater.main")


async def run_engine(settings: Settings, stop: asyncio.Event) -> int:
    """One engine until stopped or until it died: then the process ends, to be started afresh."""
    name = settings.name or f"{slug(socket.gethostname())[:40]}-{os.getpid()}"
    try:
        engine, served = engines.make(settings, name)
    except EngineUnavailable as error:
        _log.error("engine_cannot_start", reason=str(error))
        return HOPELESS
    actors: list[EngineActor] = []

    async def make(world: World, own: str = name, one: Engine = engine) -> Actor:
        try:
            if restricted(settings):
                _log.info("fleet_not_compared", reason="this key may not list model cards")
            else:
                await preflight.against_fleet(world, settings, served.files.name, cpu=engines.on_cpu())
        except EngineUnavailable as error:
            _log.error("engine_cannot_start", reason=str(error))
            raise Hopeless(str(error)) from error
        actor = EngineActor(
            world,
            own,
            one,
            served,
            drain_s=settings.drain_s,
            standing=Standing(settings.role, instance=name, tier=settings.tier, taints=settings.taint),
            lora=adapters.settings_of(settings, own),
            health=HealthSettings(settings.canary_s, settings.probe_idle_s, settings.probe_s),
        )
        actors.append(actor)
        return actor

    def labels() -> dict[str, str]:
        actor = actors[0] if actors else None
        pool = str(actor.stats().get("pool", "")) if actor else ""
        role = actor.standing.role if actor else settings.role
        return {"worker": name, "pool": pool, "role": role, "rank": "0"}

    collector = WorkerCollector(lambda: [(actor.name, actor.stats) for actor in list(actors)])

    async def run() -> int:
        if has_ranks(engine):
            return await run_ranks(settings, name, engine, make, stop, partial(run_one, collector=collector))
        return await run_one(
            settings, "worker", name, make, stop, restarts=False, labels=labels, collector=collector
        )

    if settings.engine == "vllm" and settings.metrics_port:
        with metrics_folder.per_life():
            return await run()
    return await run()


def restricted(settings: Settings) -> bool:
    """Does this process log in with a key of its own kind, which may do what its kind needs and no more?"""
    named = "@" in settings.nats
    return bool(named or settings.nats_keys_dir or settings.nats_nkey_file or settings.nats_creds_file)
