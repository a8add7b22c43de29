"""The edge actor: HTTP in, tokens out.

Subjects in
    hw.<ns>.edge.<edge>.frames; the lease and card tables
Subjects out
    hw.<ns>.route.<pool>; hw.<ns>.engine.<worker>.<epoch>.{generate,cancel,status}; the request log
State
    the requests it owes an end, each with its tokens so far; models with their tokenizers
On lag
    a client that does not read gets a bounded queue, then is cut; frames lost on the way are asked for
On loss of the log
    serves on; the request log's events wait in a bounded queue
On loss of NATS
    streams pause; when it is back each request asks its engine for what it missed, or moves
On stop
    takes no new requests (503), finishes those it has within `drain_s`, then ends them with an error
"""

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.bus_port import Subscription
from headwater.actors.edge.app import App
from headwater.actors.edge.errors import upstream_failed
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.models import Models
from headwater.actors.world import World
from headwater.events.writer import Writer
from headwater.schemas import subjects

KEEP_ALIVE_S = 75
"""Longer than the idle time of common load balancers (60 s), so that they never meet a closed connection."""

BACKLOG = 4096


class EdgeActor(Actor):
    """See the module. The listening socket is bound by the caller, so a taken port is an early, clear error."""

    kind = "edge"

    def __init__(self, world: World, name: str, listener: socket.socket, *, drain_s: float = 30.0) -> None:
        super().__init__(world, name)
        self._listener = listener
        self._drain_s = drain_s
        self._models = Models(world)
        self._fleet = Fleet(world, name, self.spawn)
        self._lease: lease.LeaseHandle | None = None
        self._records: Writer | None = None
        self._frames: Subscription | None = None
        self._app: App | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "draining" if self.stopping else "ready",
            "models": [card.name for card in self._models.cards()],
            "active_requests": self._app.active if self._app else 0,
            "streams": len(self._fleet.sagas),
        }

    async def start(self) -> None:
        """See `Actor.start`."""
        world = self.world
        self._lease = await lease.take(world.leases, "edge", self.name, world.clock, ids=world.ids())
        self._records = Writer(
            world.requests,
            subjects.request_subject(world.ns, self.name),
            self.name,
            self._lease.epoch,
            world.clock,
        )
        self._frames = await world.bus.subscribe(
            subjects.edge_frames(world.ns, self.name), self._fleet.on_frame
        )
        self.spawn(self._hold(), "lease")
        self.spawn(self._records.run(), "records")
        self.spawn(self._models.run(), "models")
        self.spawn(self._fleet.watch_leases(), "leases")
        self.spawn(self._fleet.watch_silence(), "silence")
        await self._models.known.wait()
        self._app = App(self._fleet, self._models, self._records, lambda: self.stopping)
        config = uvicorn.Config(
            self._app,
            http="httptools",
            loop="none",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._serving = self.spawn(self._server.serve(sockets=[self._listener]), "http")
        while not self._server.started and not self._serving.done():
            await world.clock.sleep(0.005)
        host, port = self._listener.getsockname()[:2]
        self.log.info("edge_listens", url=f"http://{host}:{port}")

    async def _hold(self) -> None:
        """An edge whose lease lapsed goes on serving: nothing it writes is contested. It takes a new one."""
        while self._lease is not None:
            reason = await self._lease.hold()
            self.log.warning("lease_lost", reason=reason)
            world = self.world
            self._lease = await lease.take(world.leases, "edge", self.name, world.clock, ids=world.ids())

    async def drain(self) -> None:
        """See `Actor.drain`."""
        active = self._app.active if self._app else 0
        self.log.info("draining", requests=active)
        clock = self.world.clock
        deadline = clock.monotonic_s() + self._drain_s
        while self._app is not None and self._app.active and clock.monotonic_s() < deadline:
            await clock.sleep(0.02)
        for saga in list(self._fleet.sagas.values()):
            saga.fail(upstream_failed("The edge was stopped."))
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=3.0)
        if self._records is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._records.flush()
            except TimeoutError:
                self.log.warning("request_events_not_written", pending=self._records.pending)
        if self._lease is not None:
            await self._lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""
        if self._frames is not None:
            await self._frames.unsubscribe()
        self._listener.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    def capture_signals(self) -> Any:
        """Install nothing."""
        return contextlib.nullcontext()
