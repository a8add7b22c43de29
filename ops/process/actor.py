"""One actor as a process: its ports, metrics, restarts and end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import structlog
from prometheus_client.registry import Collector

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.supervisor import RestartLimitReached, Unrecoverable, supervise
from headwater.engines.process.heap import freeze_heap
from headwater.ops.config.cache_dir import cache_folder
from headwater.ops.config.nats import NatsSettings, StreamSettings
from headwater.ops.config.process import MetricsSettings
from headwater.ops.nats.connect import ports_of
from headwater.ops.process import metrics
from headwater.ops.process.kernels import compile_kernels
from headwater.ops.process.probes import ProbeBoard
from headwater.schemas.subjects import InboxKind

EXIT_UNRECOVERABLE = 3
"""Exit code of a process that need not be started again: it would fail in the same way."""

_log = structlog.get_logger("headwater.main")

Make = Callable[[Ports], Awaitable[Actor]]


class Host(NamedTuple):
    """What an actor's process needs besides the actor. `cache_dir` as the setting of that name has it."""

    nats: NatsSettings
    metrics: MetricsSettings
    cache_dir: str = "none"
    streams: StreamSettings = StreamSettings()


async def run_one(
    host: Host,
    kind: InboxKind,
    name: str,
    make: Make,
    stop: asyncio.Event,
    *,
    restarts: bool = True,
    labels: metrics.Labels | None = None,
    collector: Collector | None = None,
) -> int:
    """Run one actor with ports of its own until stopped; returns the exit status.

    `restarts` False: the process ends with the actor. `labels` are added to each metric; `collector` adds metrics.
    """
    # Loading compiled kernels takes a good part of a second: before the first request, not during it.
    compile_kernels()
    freeze_heap()
    board = ProbeBoard(host.metrics.live_timeout_s)
    if host.metrics.port:
        metrics.serve(host.metrics, labels, collector, board)
    running: list[Actor] = []
    async with (
        _probing(board, running),
        ports_of(
            host.nats, kind, name, streams=host.streams, cache_dir=cache_folder(host.cache_dir)
        ) as ports,
    ):
        async with _stopping(stop) as stops:

            async def one_life() -> str:
                actor = await make(ports)
                running[:] = [actor]
                stops.append(actor.stop)
                try:
                    if stop.is_set():
                        actor.stop()
                    reason = await actor.run()
                    if actor.unrecoverable:
                        raise Unrecoverable(reason)
                    return reason
                finally:
                    stops.remove(actor.stop)
                    running.clear()

            if not restarts:
                try:
                    reason = await one_life()
                except Unrecoverable:
                    return EXIT_UNRECOVERABLE
                if reason:
                    _log.error("actor_ended", reason=reason)
                return 1 if reason else 0
            try:
                work = asyncio.ensure_future(supervise(name, one_life, ports.clock))
                waiting = asyncio.ensure_future(stop.wait())
                await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not stops and not work.done():
                    work.cancel()
                await work
            except RestartLimitReached as error:
                _log.error("process_abandoned", reason=str(error))
                return 1
            except asyncio.CancelledError:
                return 0
    return 0


@contextlib.asynccontextmanager
async def _probing(board: ProbeBoard, running: list[Actor]) -> AsyncIterator[None]:
    """Hands the state of the actor that runs to the threads of the metrics port."""
    beats = asyncio.create_task(
        board.keep_beating(lambda: running[0].readiness if running else None), name="probes"
    )
    try:
        yield
    finally:
        beats.cancel()


@contextlib.asynccontextmanager
async def _stopping(stop: asyncio.Event) -> AsyncIterator[list[Callable[[], None]]]:
    """Calls every registered stop function once `stop` is set."""
    stops: list[Callable[[], None]] = []

    async def watch() -> None:
        await stop.wait()
        for function in list(stops):
            function()

    watcher = asyncio.create_task(watch(), name="stop watcher")
    try:
        yield stops
    finally:
        watcher.cancel()
