"""One actor as a process: its ports, metrics, restarts and end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple

import structlog
from prometheus_client.registry import Collector

from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.supervisor import RestartLimitReached, Unrecoverable, supervise
from headwater.actors.runtime.tasks import cancel_all
from headwater.engines.process.heap import collect_rarely, freeze_heap
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

EXIT_START_FAILED: Final = 4
"""Exit code of a process whose actor ended before it was ready, for a reason that may not hold at the next start."""

STOP_CHECK_S: Final = 0.5
"""How often a process that stops looks for the actor that is still to be stopped."""

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
    if kind == "edge":
        collect_rarely()
    board = ProbeBoard(host.metrics.live_timeout_s)
    if host.metrics.port:
        metrics.serve(host.metrics, labels, collector, board, kind=kind)
    running: list[Actor] = []
    started = asyncio.Event()

    async def one_life(ports: Ports) -> str:
        nonlocal started
        actor = await make(ports)
        running[:], started = [actor], actor.ready
        try:
            if stop.is_set():
                actor.stop()
            reason = await actor.run()
            if actor.unrecoverable:
                raise Unrecoverable(reason)
            return reason
        finally:
            running.clear()

    async def serve() -> int:
        async with (
            _probing(board, running),
            ports_of(
                host.nats, kind, name, streams=host.streams, cache_dir=cache_folder(host.cache_dir)
            ) as ports,
        ):
            try:
                if restarts:
                    await supervise(name, lambda: one_life(ports), ports.clock)
                    return 0
                reason = await one_life(ports)
            except RestartLimitReached as error:
                _log.error("process_abandoned", reason=str(error))
                return 1
            except Unrecoverable:
                return EXIT_UNRECOVERABLE
            if not reason:
                return 0
            _log.error("actor_ended", reason=reason)
            return 1 if started.is_set() else EXIT_START_FAILED

    return await _until_stopped(serve(), running, stop)


async def _until_stopped(work: Coroutine[Any, Any, int], running: list[Actor], stop: asyncio.Event) -> int:
    """The result of `work`. Once `stop` is set, the actor that runs is stopped; without one `work` is cancelled, and the result is 0."""
    task = asyncio.create_task(work, name="actor")
    waiting = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        while not task.done():
            if running:
                running[0].stop()
            else:
                task.cancel()
            # One that fails while it drains is not started again.
            await asyncio.wait({task}, timeout=STOP_CHECK_S)
        return 0 if task.cancelled() else task.result()
    finally:
        await cancel_all([task, waiting])


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
