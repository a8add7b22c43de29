"""Checks before an engine loads anything: settings against each other, and against the running fleet."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import structlog

from headwater.actors.runtime.persistence import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.actors.worker.model_card import check_block_size
from headwater.engines.engine import EngineUnavailable
from headwater.engines.sglang import config as sglang_arguments
from headwater.engines.sglang import config as sglang_versions
from headwater.engines.sim.defaults import BLOCK_SIZE
from headwater.engines.vllm import (
    config as vllm_config,
)
from headwater.engines.vllm.config import CPU_BLOCK_SIZE
from headwater.ops.config.processes import EngineProcess
from headwater.ops.start import model as start_model
from headwater.ops.start import tensorrt_llm
from headwater.ops.start.plan import WorkerPlan, ranks_here

LOOK_S = 5.0

T = TypeVar("T")

_log = structlog.get_logger("headwater.preflight")


def check(settings: EngineProcess, workers: Sequence[WorkerPlan]) -> None:
    """The checks that need neither vLLM nor the fleet. Raises `EngineUnavailable`."""
    worker_settings, vllm = settings.worker, settings.engines.vllm
    start_model.check_names(worker_settings.tool_parser, worker_settings.reasoning_parser)
    if worker_settings.engine == "sglang":
        sglang_versions.check(
            sglang_versions.installed(), allow=settings.engines.sglang.allow_vulnerable_engine
        )
    if worker_settings.engine == "tensorrt_llm":
        for worker in workers:
            tensorrt_llm.check(settings, worker.role)
    if worker_settings.engine != "sim" and worker_settings.chat_template:
        vllm_config.template(worker_settings.chat_template)
    if worker_settings.engine != "vllm":
        vllm_config.ports(_metrics_ports(workers))
        return
    vllm_config.check(vllm_config.installed(), allow=vllm.allow_vulnerable_engine)
    for worker in workers:
        vllm_config.role(worker.role, vllm.connector, vllm.native)
    ranks = ranks_here(vllm.native)
    sides = [
        vllm_config.PortRange("--nixl-port", worker.name, worker.nixl_port, ranks)
        for worker in workers
        if worker.nixl_port
    ]
    vllm_config.ports([*sides, *_metrics_ports(workers), *_kv_event_ports(vllm.native, workers, ranks)])


def _metrics_ports(workers: Sequence[WorkerPlan]) -> list[vllm_config.PortRange]:
    return [
        vllm_config.PortRange("--metrics-port", worker.name, worker.metrics_port)
        for worker in workers
        if worker.metrics_port
    ]


def _kv_event_ports(
    native: Sequence[str], workers: Sequence[WorkerPlan], ranks: int
) -> list[vllm_config.PortRange]:
    flag = "--kv-events-config"
    text = vllm_config.value(native, "kv_events_config")
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
        for port in vllm_config.kv_event_ports(worker.name, endpoint, ranks, flag)
    ]


def known_block_size(settings: EngineProcess, *, cpu: bool) -> int:
    """Tokens per KV block that the engine will have; 0 if only the engine knows."""
    worker = settings.worker
    if worker.engine == "sim":
        return worker.block_size or BLOCK_SIZE
    if worker.engine == "sglang":
        # What it takes on a CPU is known once it runs there.
        return worker.block_size or sglang_arguments.number(settings.engines.sglang.native, "page_size", 0)
    if worker.engine != "vllm":
        return worker.block_size
    native = settings.engines.vllm.native
    return worker.block_size or vllm_config.number(native, "block_size", 0) or (CPU_BLOCK_SIZE if cpu else 0)


async def against_fleet(ports: Ports, settings: EngineProcess, model: str, *, cpu: bool) -> None:
    """Compare with the model cards of pools that have workers now, before a model is loaded; `model` is the name that clients use.

    Raises `EngineUnavailable`.
    """
    worker, vllm = settings.worker, settings.engines.vllm
    cards = await _read(CardTable(ports.cards).models)
    leases = await _read(LeaseTable(ports.leases).read_all)
    live = {lease.pool: lease.name for lease in leases if lease.kind == "worker"}
    size = known_block_size(settings, cpu=cpu)
    if size:
        check_block_size(model, size, cards, live)
    if worker.engine == "vllm":
        allow = vllm.allow_mixed_versions
        vllm_config.versions(worker.role, vllm_config.installed(), model, cards, set(live), allow=allow)


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
