"""What is looked at before an engine loads anything: settings against each other, and against the running fleet."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
import structlog

from headwater.actors.world import World
from headwater.engines.engine import EngineUnavailable
from headwater.engines.vllm import checks, native, versions
from headwater.engines.vllm.arguments import CPU_BLOCK_SIZE
from headwater.events.table import Table
from headwater.ops.config import Settings
from headwater.ops.workers import WorkerPlan, ranks_here
from headwater.schemas.card import Lease, ModelCard

LOOK_S = 5.0

_log = structlog.get_logger("headwater.preflight")


def check(settings: Settings, workers: Sequence[WorkerPlan]) -> None:
    """Everything that needs neither vLLM nor the fleet. Raises `EngineUnavailable`."""
    if settings.engine != "vllm":
        checks.ports(_metrics_ports(workers))
        return
    versions.check(versions.installed(), allow=settings.allow_vulnerable_engine == "yes")
    if settings.chat_template:
        checks.template(settings.chat_template)
    for worker in workers:
        checks.role(worker.role, settings.connector, settings.native)
    ranks = ranks_here(settings)
    sides = [
        checks.Ports("--nixl-port", worker.name, worker.nixl_port, ranks)
        for worker in workers
        if worker.nixl_port
    ]
    checks.ports([*sides, *_metrics_ports(workers), *_kv_event_ports(settings, workers, ranks)])


def _metrics_ports(workers: Sequence[WorkerPlan]) -> list[checks.Ports]:
    return [
        checks.Ports("--metrics-port", worker.name, worker.metrics_port)
        for worker in workers
        if worker.metrics_port
    ]


def _kv_event_ports(settings: Settings, workers: Sequence[WorkerPlan], ranks: int) -> list[checks.Ports]:
    flag = "--kv-events-config"
    text = native.value(settings.native, "kv_events_config")
    if not text:
        return []
    try:
        config = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineUnavailable(f"{flag} {text}: {error}. Give a JSON object") from error
    endpoints = [config.get(name) for name in ("endpoint", "replay_endpoint")]
    return [
        port
        for worker in workers
        for endpoint in endpoints
        if isinstance(endpoint, str)
        for port in checks.kv_event_ports(worker.name, endpoint, ranks, flag)
    ]


def known_block_size(settings: Settings, *, cpu: bool) -> int:
    """Tokens per block that the engine will have, 0 where only it knows."""
    if settings.engine == "sim":
        return settings.block_size or 16
    return (
        settings.block_size
        or native.number(settings.native, "block_size", 0)
        or (CPU_BLOCK_SIZE if cpu else 0)
    )


async def against_fleet(world: World, settings: Settings, model: str, *, cpu: bool) -> None:
    """Compare with the model cards of pools that have workers now. Raises `EngineUnavailable`."""
    cards, live = await _pools(world.cards, world.leases)
    size = known_block_size(settings, cpu=cpu)
    if size:
        checks.block_size(model, size, cards, live)
    if settings.engine == "vllm":
        allow = settings.allow_mixed_versions == "yes"
        checks.versions(settings.role, versions.installed(), model, cards, live, allow=allow)


async def _pools(cards: Table, leases: Table) -> tuple[list[ModelCard], set[str]]:
    """All model cards, and the pools that have a worker."""
    found: list[ModelCard] = []
    for key, value in (await _all(cards)).items():
        # A pool's own card; those of its adapters have longer keys.
        if "." not in key:
            found.append(msgspec.json.decode(value, type=ModelCard))
    held = [msgspec.json.decode(value, type=Lease) for value in (await _all(leases)).values()]
    return found, {lease.pool for lease in held if lease.kind == "worker"}


async def _all(table: Table) -> dict[str, bytes]:
    """What is in a table now: the first entries that a watch gives, waited for while the store is away."""
    while True:
        watch = table.watch()
        try:
            async with asyncio.timeout(LOOK_S):
                entries = await anext(watch)
            return {entry.key: entry.value for entry in entries if entry.value is not None}
        except TimeoutError:
            _log.warning(
                "fleet_awaited", reason=f"the lease and card tables did not answer within {LOOK_S:.0f} s"
            )
        finally:
            if isinstance(watch, AsyncGenerator):
                await watch.aclose()
