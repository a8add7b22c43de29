"""One actor as a process: `headwater edge`, `headwater router`, `headwater engine`."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import structlog
from prometheus_client.registry import Collector

from headwater.actors.actor import Actor
from headwater.actors.edge.actor import EdgeActor
from headwater.actors.edge.server import UvicornServer
from headwater.actors.persistence import PROBE_S
from headwater.actors.router import RouterActor
from headwater.actors.shadow import ShadowActor
from headwater.actors.supervisor import GaveUp, Hopeless, supervise
from headwater.actors.world import World
from headwater.engines.heap import freeze_heap
from headwater.ops import metrics
from headwater.ops.access import credentials, onlooker
from headwater.ops.children import HOPELESS
from headwater.ops.config import ConfigError, Settings, cache_dir
from headwater.ops.queue_settings import bodies_of, clients_of, connections_of, queue_of
from headwater.ops.routing_settings import known_policy, router_weights
from headwater.ops.warm import compile_kernels
from headwater.ops.world import open_world
from headwater.schemas.subjects import InboxKind, card_pool

_log = structlog.get_logger("headwater.main")

Make = Callable[[World], Awaitable[Actor]]


def nats_url(settings: Settings) -> str:
    """Where the server is."""
    return settings.nats or f"nats://127.0.0.1:{settings.nats_port}"


def operator_world(settings: Settings, name: str) -> AbstractAsyncContextManager[World]:
    """The world of a command that looks: as the operator, or as an observer with only an observer's key."""
    return world_of(settings, onlooker(settings), name)


def world_of(settings: Settings, kind: InboxKind, name: str) -> AbstractAsyncContextManager[World]:
    """The world of a command that is no actor, with what a kind of client may do."""
    return open_world(
        nats_url(settings),
        settings.namespace,
        name,
        kind=kind,
        credentials=credentials(settings, kind, name),
        replicas=settings.replicas,
    )


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound, not yet listening socket. Raises `ConfigError` naming the address."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        free = ", or 0 for a free one" if flag == "--port" else ""
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another {flag}{free}"
        ) from error
    sock.set_inheritable(True)
    return sock


async def run_edge(settings: Settings, stop: asyncio.Event) -> int:
    """An edge until stopped."""
    listener = listen(settings.host, settings.port)
    name = settings.name or f"edge-{secrets.token_hex(3)}"

    async def make(world: World) -> Actor:
        # Each life of the actor closes its own copy.
        server = UvicornServer(listener.dup(), connections_of(settings))
        return EdgeActor(
            world,
            name,
            server,
            drain_s=settings.drain_s,
            payload=settings.record_payloads,
            limits=clients_of(settings),
            bodies=bodies_of(settings),
            special_tokens_in_text=settings.allow_special_tokens_in_text == "yes",
            probe_s=PROBE_S,
        )

    return await run_one(settings, "edge", name, make, stop)


async def run_router(settings: Settings, stop: asyncio.Event) -> int:
    """A router until stopped. Without a pool it waits for the first model card."""
    name = settings.name or f"router-{secrets.token_hex(3)}"
    policy, weights = known_policy(settings.policy), router_weights(settings)

    async def make(world: World) -> Actor:
        pool = settings.pool or await first_pool(world)
        return RouterActor(
            world,
            name,
            pool,
            weights=weights,
            policy=policy,
            temperature=settings.router_temperature,
            queue=queue_of(settings),
            probe_s=PROBE_S,
        )

    return await run_one(settings, "router", name, make, stop)


async def run_shadow(settings: Settings, policy: str, judge: str, stop: asyncio.Event) -> int:
    """A shadow until stopped. Its name says its policy, so that the next life knows what this one has judged."""
    known_policy(policy)
    known_policy(judge, option="--judge")
    name = settings.name or f"shadow-{policy}"

    async def make(world: World) -> Actor:
        pool = settings.pool or await first_pool(world)
        return ShadowActor(world, name, pool, policy=policy, judge=judge)

    return await run_one(settings, "shadow", name, make, stop)


async def first_pool(world: World) -> str:
    """The pool of the first model card there is."""
    async for entries in world.cards.watch():
        pools = sorted(entry.key for entry in entries if entry.value is not None and card_pool(entry.key))
        if pools:
            return pools[0]
    raise ConfigError("the card table ended")


async def run_one(
    settings: Settings,
    kind: InboxKind,
    name: str,
    make: Make,
    stop: asyncio.Event,
    *,
    restarts: bool = True,
    labels: metrics.Labels | None = None,
    collector: Collector | None = None,
) -> int:
    """One actor of a kind in a world of its own, until stopped; returns the exit status.

    `restarts` False: its end is the process's. `labels` are added to its metrics, and so is what `collector` gives.
    """
    # Loading compiled kernels takes a good part of a second: before the first request, not during it.
    compile_kernels()
    freeze_heap()
    if settings.metrics_port:
        metrics.serve(settings.metrics_port, settings.host, labels, collector)
    opening = open_world(
        nats_url(settings),
        settings.namespace,
        name,
        kind=kind,
        credentials=credentials(settings, kind, name),
        replicas=settings.replicas,
        cache_dir=cache_dir(settings),
    )
    async with opening as world:
        async with _stopping(stop) as stops:

            async def one_life() -> str:
                actor = await make(world)
                stops.append(actor.stop)
                try:
                    if stop.is_set():
                        actor.stop()
                    reason = await actor.run()
                    if actor.hopeless:
                        raise Hopeless(reason)
                    return reason
                finally:
                    stops.remove(actor.stop)

            if not restarts:
                try:
                    reason = await one_life()
                except Hopeless:
                    return HOPELESS
                if reason:
                    _log.error("actor_ended", reason=reason)
                return 1 if reason else 0
            try:
                work = asyncio.ensure_future(supervise(name, one_life, world.clock))
                waiting = asyncio.ensure_future(stop.wait())
                await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not stops and not work.done():
                    work.cancel()
                await work
            except GaveUp as error:
                _log.error("gave_up", reason=str(error))
                return 1
            except asyncio.CancelledError:
                return 0
    return 0


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
