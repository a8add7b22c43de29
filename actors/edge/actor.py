"""The edge actor: HTTP in, tokens out.

Subjects in
    hw.<ns>.edge.<edge>.{frames,media,offer,streams.<epoch>}; hw.<ns>.usage.*; the tables of leases, cards and API keys
Subjects out
    hw.<ns>.route.<pool>; hw.<ns>.wait.<pool>.<router>.<epoch>; hw.<ns>.engine.<worker>.<epoch>.{generate,cancel,status};
    hw.<ns>.usage.<edge>; the request log
State
    requests that have not ended, each with its tokens so far; models with their tokenizers
On lag
    a client that does not read gets a bounded queue, then is disconnected; lost frames are queried
On loss of the log
    continues to serve; request events wait in a bounded queue, and near its bound requests are refused (503)
On loss of NATS
    API keys known last stay valid; each edge enforces rate limits on its own; streams pause; after reconnecting, each request
    queries its worker for what it missed, or moves
On failure
    ends each open request with an error before the next incarnation of the actor listens
On stop
    accepts no connections, finishes open requests within `drain_s` seconds, then ends them with an error
"""

import asyncio
import contextlib
from typing import Any

from headwater.actors.edge.admit.control import AccessServices
from headwater.actors.edge.admit.limiter import RateLimiter, UsageSharing
from headwater.actors.edge.apis.app import DEFAULTS, App
from headwater.actors.edge.catalog import ModelCatalog
from headwater.actors.edge.saga.record import OpenRequests
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import AccessSettings, EdgeSettings
from headwater.actors.http.asgi import allow_origins
from headwater.actors.http.errors import upstream_failed
from headwater.actors.http.server import STOP_S, HttpServer
from headwater.actors.limits import DRAIN_TIMEOUT_S, BodyLimits
from headwater.actors.media.intake import MediaIntake
from headwater.actors.runtime import lease
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.lease import OfferAnswers
from headwater.actors.runtime.ports import Handler, Persistence, Ports, Subscription
from headwater.engines.transfer.slab import OpenTransfer
from headwater.events.ports import LogError
from headwater.events.writer import WriterFenced
from headwater.schemas import subjects

ANSWER_S_MAX = 2.0
RELEASE_S_MAX = 1.0
"""Seconds that clients of a failed actor have to read their errors."""


class EdgeActor(Actor):
    """The edge as an actor. `bodies` are the limits of request bodies. `probes`: it serves /metrics, /health and /live, too.

    `intake` fetches and decodes images, and is the caller's to close; None: requests are text only.
    """

    kind = "edge"

    def __init__(
        self,
        ports: Ports,
        name: str,
        server: HttpServer,
        settings: EdgeSettings = DEFAULTS,
        *,
        drain_s: float = DRAIN_TIMEOUT_S,
        access: AccessSettings | None = None,
        probe_s: float = 0.0,
        cors_origins: tuple[str, ...] = (),
        bodies: BodyLimits | None = None,
        probes: bool = True,
        intake: MediaIntake | None = None,
        open_media_transfer: OpenTransfer | None = None,
    ) -> None:
        super().__init__(ports, name)
        self._server = server
        self._settings = settings
        self._bodies = bodies
        self._probes = probes
        self._drain_s = drain_s
        self._probe_s = probe_s
        self._auth_mode = (access or AccessSettings()).mode
        self._access = AccessServices(access or AccessSettings(), ports)
        self._cors_origins = cors_origins
        self._intake = intake
        self._open_media_transfer = open_media_transfer
        self._limiter = RateLimiter(ports.clock)
        self._sharing: UsageSharing | None = None
        self._persistence = Persistence(ports.clock, self.log)
        self._models = ModelCatalog(ports)
        self._workers = WorkerRegistry(ports, name, self.spawn, settings.encode_legs)
        self._lease: lease.LeaseHandle | None = None
        self._ledger: OpenRequests | None = None
        self._subscriptions: list[Subscription] = []
        self._app: App | None = None
        self._serving: asyncio.Task[None] | None = None

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        return {
            "state": "restarting" if self._workers.closed else "draining" if self.stopping else "ready",
            "models": [model.card.name for model in self._models.all()],
            "files": {
                card.pool: {"tokenizer": card.tokenizer, "chat_template": card.chat_template}
                for card in self._models.cards()
            },
            "auth": self._auth_mode,
            "active_requests": self._app.active if self._app else 0,
            "streams": len(self._workers.receivers),
        }

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """See `Actor.readiness`: whether clients should be sent here."""
        return self._app.health() if self._app is not None else super().readiness()

    def workers(self, pool: str) -> int:
        """Number of workers of a pool whose lease is live."""
        return self._workers.workers(pool)

    @property
    def lease_epoch(self) -> int:
        """The epoch of its lease; 0 before it has one."""
        return self._lease.epoch if self._lease is not None else 0

    @property
    def media_held(self) -> int:
        """Items of media that are kept for workers, for requests in flight."""
        return len(self._workers.media)

    async def start(self) -> None:
        """See `Actor.start`."""
        ports = self.ports
        self._lease = await self._take_lease()
        self._workers.begin(self._lease.epoch)
        self._ledger = OpenRequests(
            ports.requests, ports.ns, self.name, self._lease.epoch, ports.clock, probe_s=self._probe_s
        )
        await self._ledger.open()
        self._persistence.watch("request log", self._ledger.writer)
        self._persistence.measure("requests", self._ledger.writer)
        self.spawn(self._persistence.run(), "persistence")
        await self._subscribe(subjects.edge_frames(ports.ns, self.name), self._workers.on_frame)
        if self._open_media_transfer is not None:
            answers = OfferAnswers(ports.bus)
            answers.transfer = self._workers.media.transfer = await self._open_media_transfer()
            await self._subscribe(subjects.edge_offer(ports.ns, self.name), answers.on_offer)
        await self._subscribe(subjects.edge_media(ports.ns, self.name), self._workers.media.on_query)
        # Under the epoch of its handles, which it keeps if it has to take its lease again.
        streams = subjects.edge_streams(ports.ns, self.name, self._workers.epoch)
        await self._subscribe(streams, self._workers.on_streams)
        self._sharing = UsageSharing(ports.bus, ports.ns, self.name, self._lease.epoch, self._limiter)
        await self._sharing.start()
        self.spawn(self._sharing.run(), "usage")
        self.spawn(self._hold(), "lease")
        self.spawn(self._ledger.writer.run(), "records")
        self.spawn(self._models.run(), "models")
        self.spawn(self._workers.watch_leases(), "leases")
        self.spawn(self._workers.watch_silence(), "silence")
        for loop, name in self._access.loops():
            self.spawn(loop, name)
        await self._access.prepare()
        await self._models.known.wait()
        self._app = App(
            self._workers,
            self._models,
            self._ledger,
            self,
            self._settings,
            bodies=self._bodies,
            probes=self._probes,
            persistence=self._persistence,
            access=self._access.control,
            limiter=self._limiter,
            intake=self._intake,
            requests=self.requests,
        )
        for loop, name in self._app.videos.loops():
            self.spawn(loop, name)
        self._serving = self.spawn(self._server.serve(allow_origins(self._app, self._cors_origins)), "http")
        listening = asyncio.ensure_future(self._server.listening.wait())
        await asyncio.wait({listening, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        self.log.info("edge_listening", url=self._server.url)

    async def _subscribe(self, subject: str, handler: Handler) -> None:
        self._subscriptions.append(await self.ports.bus.subscribe(subject, handler))

    async def _hold(self) -> None:
        """Hold the lease. If another edge takes it, continue to serve and wait until it is free.

        Raises `WriterFenced` if the other one has written to the log: then this one cannot any more, and must accept no request.
        """
        while self._lease is not None:
            reason = await self._lease.hold()
            self.log.warning("lease_lost", reason=reason)
            held = await self._take_lease()
            # Where the log does not answer, the next append is fenced.
            with contextlib.suppress(LogError):
                if await self._newest_epoch() > self._workers.epoch:
                    await held.release()
                    raise WriterFenced(f"another edge has written as {self.name}")
            self._lease = held

    async def _newest_epoch(self) -> int:
        ports = self.ports
        return await lease.newest_epoch(ports.requests, subjects.request_subject(ports.ns, self.name))()

    async def _take_lease(self) -> lease.LeaseHandle:
        ports = self.ports
        held = await lease.take(
            ports.leases, "edge", self.name, ports.clock, ids=ports.ids(), newest=self._newest_epoch
        )
        held.persistence = self._persistence
        self._persistence.watch("lease store", held)
        return held

    async def drain(self) -> None:
        """See `Actor.drain`."""
        active = self._app.active if self._app else 0
        self.log.info("draining", requests=active)
        # Requests that were read on existing connections are still answered.
        self._server.stop()
        clock = self.ports.clock
        deadline = clock.monotonic_s() + self._drain_s
        while self._app is not None and self._app.active and clock.monotonic_s() < deadline:
            await clock.sleep(0.02)
        if self._app is not None:
            await self._app.videos.release()
        for call in list(self._workers.calls):
            call.abort(upstream_failed("Server is shutting down; retry."))
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
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        if self._sharing is not None:
            await self._sharing.stop()
        # After a drain no requests are left. After a failure each gets its error before its connection ends.
        await self._workers.close("The edge that served this request failed and is restarting; retry.")
        deadline = self.ports.clock.monotonic_s() + ANSWER_S_MAX
        while self._app is not None and self._app.active and self.ports.clock.monotonic_s() < deadline:
            await self.ports.clock.sleep(0.02)
        await self._workers.media.close()
        self._server.close()
        if self._lease is not None:
            # After a failure the next start would else wait until it lapses.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S_MAX):
                    await self._lease.release()
