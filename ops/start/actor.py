"""One actor as a process: its ports, metrics, restarts and end; streams kept in existence; and leases of dead processes.

Where users have limited permissions, only the operator may create streams.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import structlog
from prometheus_client.registry import Collector

from headwater.actors.runtime.actor import Actor, RestartLimitReached, Unrecoverable, cancel_all, supervise
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LeaseTable
from headwater.engines import logs
from headwater.engines.process import collect_rarely, freeze_heap
from headwater.events.jetstream import Connection, JetStreamTable
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool
from headwater.events.ports import LogError
from headwater.events.table import STREAM_SIZES, StreamSizes, Table
from headwater.ops.config.processes import MetricsSettings
from headwater.ops.config.sections import NatsSettings, StreamSettings
from headwater.ops.config.setting import cache_folder
from headwater.ops.diagnosis import explain_engine_log, log_findings
from headwater.ops.nats.connect import ports_of
from headwater.ops.start import metrics
from headwater.ops.start.metrics import Health, ProbeBoard
from headwater.ops.start.system import ServiceManager
from headwater.schemas import subjects
from headwater.schemas.subjects import InboxKind
from headwater.schemas.tables import LeaseKind

if TYPE_CHECKING:
    from headwater.router.index.prefix_index import PrefixIndex
    from headwater.schemas.hashing import U64

COMPILING = "compiling numerical kernels, which takes about ten seconds once for each installation"

NOTICE_AFTER_S = 1.5
"""Loading the kernels from numba's cache takes half a second."""


def compile_kernels(say: Callable[[str], object] = lambda text: logs.say(f"{text} …")) -> None:
    """Call every kernel with each of its argument types: numba loads it from its cache, or compiles it.

    `say` gets one line of text when nothing is in the cache, from another thread.
    """
    notice = threading.Timer(NOTICE_AFTER_S, say, (COMPILING,))
    notice.daemon = True
    notice.start()
    try:
        with _interrupted_at_once():
            _call_kernels()
    finally:
        notice.cancel()
        # `up` forks right after this, and a thread that still ends may hold a lock for ever in the child.
        notice.join()


@contextlib.contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process within the block: as an exception it may be lost in a callback of the compiler, which then fails."""
    outside_a_loop = threading.current_thread() is threading.main_thread()
    if not outside_a_loop or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _call_kernels() -> None:
    from headwater.actors.edge.tokenizer import SHORT_CHARACTERS, ControlTokens
    from headwater.actors.http.body import count
    from headwater.router.index.prefix_index import PrefixIndex
    from headwater.schemas import hashing

    hashes = hashing.sequence_hashes(np.arange(64, dtype=np.uint32), 16)
    index = PrefixIndex()
    index.add_worker("a")
    index.store("a", 2, 0, hashes)
    index.find(hashes)
    index.path(int(hashes[-1]), len(hashes))
    index.remove("a", 2, hashes)
    index.store("a", 0, 0, hashes)
    index.digest()
    index.reserve(2 * index.capacity)
    index.adopt(index.packed(), index.rows, index.words, index.tiers)
    index.clear("a")
    _compile_scoring(index, hashes)
    ControlTokens(["<|a|>"]).split("<|a|>" * SHORT_CHARACTERS, 2)
    body = np.frombuffer(b'{"prompt": [1, "a"]}', np.uint8)
    count(body)


def _compile_scoring(index: "PrefixIndex", hashes: "U64") -> None:
    """A decision without workers."""
    from headwater.router.context import DecisionContext
    from headwater.router.decide import Prompt, decide
    from headwater.router.load import Loads
    from headwater.schemas.routing import RouteQuery, Weights

    query, context = RouteQuery("", 1, 1, b""), DecisionContext(1, 0, 0, 0, Weights(), False)
    decide(index, Loads(), set(), Prompt(len(hashes), hashes, 0), query, context)


# The process.

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


async def _run(actor: Actor) -> str:
    """Run an actor; returns why it ended. Of an engine's failure the log names the cause, if it is a known one."""
    reason = await actor.run()
    if actor.kind == "worker":
        log_findings(explain_engine_log(reason, f"worker {actor.name}"))
    return reason


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
    _warm_up(kind)
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
            reason = await _run(actor)
            if actor.unrecoverable:
                raise Unrecoverable(reason)
            return reason
        finally:
            running.clear()

    async def serve() -> int:
        async with (
            _probing(board, running),
            _ports(host, kind, name) as ports,
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


def _ports(host: Host, kind: InboxKind, name: str) -> AbstractAsyncContextManager[Ports]:
    cache = cache_folder(host.cache_dir)
    return ports_of(host.nats, kind, name, streams=host.streams, cache_dir=cache, waits=True)


def _warm_up(kind: InboxKind) -> None:
    """Load compiled kernels, which takes a good part of a second: before the first request, not during it. Then set up the collection of garbage."""
    compile_kernels(lambda text: _log.info("kernels_compile", text=text))
    freeze_heap()
    if kind in ("edge", "picker"):
        collect_rarely()


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
    """Hands the state of the actor that runs to the threads of the metrics port, and to systemd."""
    manager = ServiceManager()

    def health() -> Health | None:
        manager.tell_alive(ready=bool(running) and running[0].ready.is_set())
        return running[0].readiness if running else None

    beats = asyncio.create_task(board.keep_beating(health), name="probes")
    try:
        yield
    finally:
        manager.tell_stopping()
        beats.cancel()


# The streams of a namespace and the logs of its pools, kept in existence by the operator.

RETRY_S = 1.0
KEEP_S = 2.0

_pools_log = structlog.get_logger("headwater.pools")


async def keep_namespace(
    client: Connection, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES
) -> None:
    """Recreate the namespace's streams and tables whenever they were deleted. Runs until cancelled."""
    while True:
        await asyncio.sleep(KEEP_S)
        try:
            await ensure_namespace(client, ns, replicas=replicas, sizes=sizes)
        except LogError as error:
            _pools_log.warning("namespace_streams_not_made", reason=str(error))


async def keep_pools(client: Connection, ns: str, replicas: int, sizes: StreamSizes = STREAM_SIZES) -> None:
    """Create the log of every pool that has a model card, and again whenever it was deleted. Runs until cancelled."""
    cards = CardTable(JetStreamTable(client, subjects.card_bucket(ns)))
    pools: set[str] = set()
    while True:
        try:
            # Asked again and again: no event reports a log that was deleted, and the cards may be lost with it.
            pools |= set(await cards.pools())
            for pool in sorted(pools):
                await ensure_pool(client, ns, pool, replicas=replicas, sizes=sizes)
        except LogError as error:
            _pools_log.warning("pool_streams_not_made", reason=str(error))
        await asyncio.sleep(RETRY_S)


# Revocation of a dead process's lease, so that its pool need not wait for it to expire.

_lease_log = structlog.get_logger("headwater.leases")


async def revoke_leases_of(leases: Table, kind: LeaseKind, name: str, pid: int) -> bool:
    """Delete the lease of (`kind`, `name`) if process `pid` of this machine held it. True if it did."""
    try:
        table = LeaseTable(leases)
        held = await table.get(kind, name)
        if held is None or (held.host, held.pid) != (socket.gethostname(), pid):
            return False
        await table.delete(kind, name)
    except LogError as error:
        _lease_log.warning("lease_not_revoked", kind=kind, name=name, reason=str(error))
        return False
    _lease_log.info("lease_revoked", kind=kind, name=name, pid=pid)
    return True
