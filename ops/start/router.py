"""One router, or one shadow router, as a process."""

import asyncio
import secrets

from headwater.actors.router.actor import RouterActor
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import PROBE_S, Ports
from headwater.actors.shadow import ShadowActor
from headwater.engines import logs
from headwater.ops.config.processes import RouterProcess, ShadowProcess
from headwater.ops.config.sections import weights_of
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import first_pool
from headwater.ops.start.actor import Host, run_one
from headwater.router.queue import QueueSettings
from headwater.schemas.routing import PolicyName


async def run_router(settings: RouterProcess, stop: asyncio.Event) -> int:
    """Run a router until stopped. Without a pool it waits for the first worker. Raises `ConfigError`."""
    name = settings.name or f"router-{secrets.token_hex(3)}"
    weights = weights_of(settings.router)
    if settings.pool and settings.for_model:
        raise ConfigError("--pool and --for-model both choose the pool: give one")

    async def make(ports: Ports) -> Actor:
        pool = settings.pool or await first_pool(ports, settings.for_model)
        return RouterActor(
            ports,
            name,
            pool,
            weights=weights,
            policy=settings.router.policy,
            temperature=settings.router.temperature,
            queue=QueueSettings(settings.busy, settings.queue),
            probe_s=PROBE_S,
        )

    logs.describe(router=name)
    return await run_one(
        Host(settings.nats, settings.metrics, settings.cache_dir, settings.streams),
        "router",
        name,
        make,
        stop,
    )


async def run_shadow(
    settings: ShadowProcess, policy: PolicyName, judge: PolicyName, stop: asyncio.Event
) -> int:
    """Run a shadow router until stopped.

    Its default name contains its policy, so that its next incarnation finds what this one has judged.
    """
    name = settings.name or f"shadow-{policy}"

    async def make(ports: Ports) -> Actor:
        pool = settings.pool or await first_pool(ports)
        return ShadowActor(ports, name, pool, policy=policy, judge=judge)

    logs.describe(shadow=name)
    return await run_one(
        Host(settings.nats, settings.metrics, settings.cache_dir), "shadow", name, make, stop
    )
