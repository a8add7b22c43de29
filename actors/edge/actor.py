"""The edge actor: HTTP in, tokens out.

Subjects in
    hw.<ns>.edge.<edge>.frames; the lease and card tables
Subjects out
    hw.<ns>.route.<pool>; hw.<ns>.wait.<pool>.<router>.<epoch>; hw.<ns>.engine.<worker>.<epoch>.{generate,cancel,status}; the request log
State
    the requests it owes an end, each with its tokens so far; models with their tokenizers
On lag
    a client that does not read gets a bounded queue, then is cut; frames lost on the way are asked for
On loss of the log
    serves on; the request log's events wait in a bounded queue, and near its bound requests are refused (503)
On loss of NATS
    streams pause; when it is back each request asks its engine for what it missed, or moves
On failure
    ends each open request with an error before the next life of the actor listens
On stop
    takes no new connections, finishes the requests it has within `drain_s`, then ends them with an error
"""

import asyncio
from typing import Any

from headwater.actors import lease
from headwater.actors.actor import Actor
from headwater.actors.bus_port import Subscription
from headwater.actors.edge.app import App
from headwater.actors.edge.errors import upstream_failed
from headwater.actors.edge.fleet import Fleet
from headwater.actors.edge.ledger import Ledger
from headwater.actors.edge.limits import BodyLimits
from headwater.actors.edge.models import Models
from headwater.actors.edge.server import STOP_S, HttpServer
from headwater.actors.edge.wishes import ClientLimits
from headwater.actors.persistence import Persistence
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.request import PayloadKind

ANSWER_S_MAX = 2.0
"""How long the clients of an actor that failed may take to read their errors."""


class EdgeActor(Actor):
    """See the module. `payload` says what of requests and answers goes into the request log, `limits` what clients may wish for."""

    kind = "edge"

    def __init__(
        self,
        world: World,
        name: str,
        server: HttpServer,
        *,
        drain_s: float = 30.0,
        payload: PayloadKind = "off",
        limits: ClientLimits | None = None,
        bodies: BodyLimits | None = None,
        special_tokens_in_text: bool = False,
        probe_s: float = 0.0,
    ) -> None:
        super().__init__(world, name)
        self._server = server
        self._payload: PayloadKind = payload
        self._drain_s = drain_s
        self._limits = limits or ClientLimits()
        self._bodies = bodies
        self._special_tokens_in_text = special_tokens_in_text
        self._probe_s = probe_s
        self._persistence = Persistence(world.clock, self.log)
        self._models = Models(world)
        self._fleet = Fleet(world, name, self.spawn)
        self._lease: lease.LeaseHandle | None = None
        self._ledger: Ledger | None = None
        self._frames: Subscription | None = None
        self._app: App | None = None
        self._serving: asyncio.Task[None] | None = None

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "restarting" if self._fleet.closed else "draining" if self.stopping else "ready",
            "models": [model.card.name for model in self._models.all()],
            "active_requests": self._app.active if self._app else 0,
            "streams": len(self._fleet.sagas),
        }

    def workers(self, pool: str) -> int:
        """Workers of a pool that this edge knows to be live."""
        return self._fleet.workers(pool)

    async def start(self) -> None:
        """See `Actor.start`."""
        world = self.world
        self._lease = await self._take_lease()
        self._fleet.begin(self._lease.epoch)
        self._ledger = Ledger(
            world.requests, world.ns, self.name, self._lease.epoch, world.clock, probe_s=self._probe_s
        )
        await self._ledger.open()
        writer = self._ledger.writer
        self._persistence.add("request log", lambda: writer.stalled_s)
        self._persistence.add("lease store", lambda: self._lease.stalled_s if self._lease else 0.0)
        self.spawn(self._persistence.run(), "persistence")
        self._frames = await world.bus.subscribe(
            subjects.edge_frames(world.ns, self.name), self._fleet.on_frame
        )
        self.spawn(self._hold(), "lease")
        self.spawn(self._ledger.writer.run(), "records")
        self.spawn(self._models.run(), "models")
        self.spawn(self._fleet.watch_leases(), "leases")
        self.spawn(self._fleet.watch_silence(), "silence")
        await self._models.known.wait()
        self._app = App(
            self._fleet,
            self._models,
            self._ledger,
            lambda: self.stopping,
            self._payload,
            self._limits,
            self._bodies,
            special_tokens_in_text=self._special_tokens_in_text,
            persistence=self._persistence,
        )
        self._serving = self.spawn(self._server.serve(self._app), "http")
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait({listening, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        self.log.info("edge_listens", url=self._server.url)

    async def _hold(self) -> None:
        """An edge whose lease another one holds goes on serving what it has, and waits until the lease is free."""
        while self._lease is not None:
            reason = await self._lease.hold()
            self.log.warning("lease_lost", reason=reason)
            self._lease = await self._take_lease()

    async def _take_lease(self) -> lease.LeaseHandle:
        world = self.world
        newest = lease.newest_epoch(world.requests, subjects.request_subject(world.ns, self.name))
        held = await lease.take(world.leases, "edge", self.name, world.clock, ids=world.ids(), newest=newest)
        held.is_stalled = lambda: self._persistence.is_stalled
        return held

    async def drain(self) -> None:
        """See `Actor.drain`."""
        active = self._app.active if self._app else 0
        self.log.info("draining", requests=active)
        # No connection is taken any more; what was read on those there are is still answered.
        self._server.stop()
        clock = self.world.clock
        deadline = clock.monotonic_s() + self._drain_s
        while self._app is not None and self._app.active and clock.monotonic_s() < deadline:
            await clock.sleep(0.02)
        for call in list(self._fleet.calls):
            call.abort(upstream_failed("The edge was stopped."))
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=STOP_S)
        if self._ledger is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._ledger.writer.flush()
            except TimeoutError:
                self.log.warning("request_events_not_written", pending=self._ledger.writer.pending)
        if self._lease is not None:
            await self._lease.release()

    async def close(self) -> None:
        """See `Actor.close`."""
        if self._frames is not None:
            await self._frames.unsubscribe()
        # After a drain there are none. After a failure each has its error before its connection ends.
        await self._fleet.close("The edge that served this request failed and starts again.")
        deadline = self.world.clock.monotonic_s() + ANSWER_S_MAX
        while self._app is not None and self._app.active and self.world.clock.monotonic_s() < deadline:
            await self.world.clock.sleep(0.02)
        self._server.close()
