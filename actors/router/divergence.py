"""Two checks of a router's fold: against the folds of the pool's other routers, and against leases and decisions.

The routers of a pool fold one log, so at one position their states must be equal.

Subjects in and out
    hw.<ns>.digest.<pool>: every router publishes the digest of its fold at certain positions and compares the others'

The positions depend on the log alone (`Marks`), so all routers choose the same ones. A digest covers what the log delivered,
without own decisions that are not in the log yet. A difference raises an alarm in the log, the metrics and the
statistics, and neither router takes snapshots while it lasts. Both keep answering: which of them is wrong is not known
here. `headwater replay` folds the same log and shows which one it agrees with; restart the other, and report what it logged.

Reconciliation compares the fold with the leases and the router's decisions:

    in the fold, no lease      the worker left: publish that to the log
    lease, not in the fold     the log lost its joining: request it to reannounce itself
    lease, cold in the fold    the log lost some of its events: request it to reannounce its cache
    decided, never accepted    no worker will accept it any more: publish that to the log

Every difference is evaluated periodically, so a request that was lost is repeated.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import structlog

from headwater import __version__
from headwater.actors.metrics import RouterMetrics
from headwater.actors.runtime.ports import BusError, Message, Ports, Subscription
from headwater.actors.runtime.tables import LeaseTable
from headwater.events.writer import Writer
from headwater.router.load import Loads
from headwater.router.state import STATE_VERSION, RouterState
from headwater.schemas import subjects
from headwater.schemas.events import WorkerLeft
from headwater.schemas.routing import DecisionVoided, StateDigest

PERIOD_NS: Final = 10_000_000_000
"""Interval between compared positions, by the log's timestamps."""

KEPT_MAX: Final = 32
"""Digests kept of each router, to compare with routers that are ahead or behind."""

ROUTERS_MAX: Final = 64
"""Routers whose digests are kept. The one that was first seen is dropped first."""

INLINE_ROWS_MAX: Final = 1 << 16
"""The most blocks whose digest is computed on the event loop. More are computed in a thread, which takes about 13 ms for each million."""

P = ParamSpec("P")
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StateDigest)


class Marks:
    """Selects the compared positions: the first message of each `PERIOD_NS`, by the times at which the log stored them.

    Messages and their times are equal for every reader, so all routers that read two neighbours agree.
    """

    def __init__(self) -> None:
        self._period = -1

    def is_marked(self, stored_ns: int) -> bool:
        """Is the next message of the log, stored at this time, the first of a period?"""
        before, self._period = self._period, stored_ns // PERIOD_NS
        return before not in (-1, self._period)

    def reset(self) -> None:
        """The next message does not follow the last one."""
        self._period = -1


class DivergenceCheck:
    """The comparison of folds by digests. For one incarnation of a router."""

    def __init__(self, ports: Ports, name: str, pool: str, metrics: RouterMetrics) -> None:
        self.alarms = 0
        self._ports = ports
        self._name = name
        self._epoch = 0
        self._subject = subjects.digests(ports.ns, pool)
        self._metrics = metrics
        self._own: OrderedDict[int, StateDigest] = OrderedDict()
        self._others: OrderedDict[str, OrderedDict[int, StateDigest]] = OrderedDict()
        self._compared = 0
        self._differs: dict[str, int] = {}
        self._subscription: Subscription | None = None
        self._log = structlog.get_logger("headwater.router").bind(router=name, pool=pool)

    def stats(self) -> dict[str, Any]:
        """Part of the router's statistics. `diverged` maps each router with another state to the first such position."""
        return {
            "diverged": dict(self._differs),
            "divergence_alarms": self.alarms,
            "compared_position": self._compared,
        }

    @property
    def diverged(self) -> bool:
        """Did another router have a different state when it was last compared?"""
        return bool(self._differs)

    async def start(self, epoch: int) -> None:
        """Subscribe to the digests of other routers."""
        self._epoch = epoch
        self._subscription = await self._ports.bus.subscribe(self._subject, self._on_digest)

    async def stop(self) -> None:
        """Unsubscribe."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def publish(self, state: RouterState, loads: Loads) -> None:
        """Publish the digest of the fold, which must not change until this returns. `loads` exclude unwritten own decisions."""
        if state.index.rows > INLINE_ROWS_MAX:
            digest = await in_thread(state.digest, loads)
        else:
            digest = state.digest(loads)
        own_digest = StateDigest(
            self._name,
            self._epoch,
            # Two builds of one release may differ.
            f"{__version__}/{STATE_VERSION}",
            state.log,
            state.since,
            state.position,
            digest,
        )
        _store(self._own, own_digest)
        for peer_digests in list(self._others.values()):
            if own_digest.position in peer_digests:
                self._compare(own_digest, peer_digests[own_digest.position])
        try:
            await self._ports.bus.publish(self._subject, _encode(own_digest))
        except BusError as error:
            self._log.warning("digest_publish_failed", reason=str(error))

    async def _on_digest(self, message: Message) -> None:
        try:
            peer_digest = _decoder.decode(message.data)
        except msgspec.DecodeError as error:
            self._log.warning("digest_unreadable", reason=str(error))
            return
        if (peer_digest.router, peer_digest.epoch) == (self._name, self._epoch):
            return
        peer_digests = self._others.setdefault(peer_digest.router, OrderedDict())
        if any(digest.epoch < peer_digest.epoch for digest in peer_digests.values()):
            # A new incarnation: digests of the former one are void.
            peer_digests.clear()
            self._clear(peer_digest.router)
        _store(peer_digests, peer_digest)
        if len(self._others) > ROUTERS_MAX:
            gone, _ = self._others.popitem(last=False)
            self._clear(gone)
        own_digest = self._own.get(peer_digest.position)
        if own_digest is not None:
            self._compare(own_digest, peer_digest)

    def _compare(self, own_digest: StateDigest, peer_digest: StateDigest) -> None:
        if own_digest.terms != peer_digest.terms:
            return
        self._compared = max(self._compared, own_digest.position)
        self._metrics.compared.inc()
        if own_digest.digest == peer_digest.digest:
            self._clear(peer_digest.router)
            return
        self.alarms += 1
        self._differs.setdefault(peer_digest.router, own_digest.position)
        self._metrics.divergence.inc()
        self._metrics.diverged.set(len(self._differs))
        self._log.critical(
            "routers_diverged",
            log_position=own_digest.position,
            digest=own_digest.digest,
            epoch=own_digest.epoch,
            other=peer_digest.router,
            other_epoch=peer_digest.epoch,
            other_digest=peer_digest.digest,
            hint="one state does not follow from the log: restart the router that `headwater replay` disagrees with",
        )

    def _clear(self, router: str) -> None:
        if self._differs.pop(router, None) is not None:
            self._log.warning("routers_converged", other=router)
        self._metrics.diverged.set(len(self._differs))


def _store(digests: OrderedDict[int, StateDigest], digest: StateDigest) -> None:
    digests[digest.position] = digest
    if len(digests) > KEPT_MAX:
        digests.popitem(last=False)


async def in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run in a thread that reads the state. A cancellation takes effect only when the thread is done: until then the fold stays stopped."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **named))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


# Reconciliation of leases, decisions and the fold.

PERIOD_S = 0.5
ROUNDS = 2
"""Consecutive rounds in which a difference must exist: a joining and its lease arrive at different times."""

VOID_AFTER_S = 15.0
"""Well above the time after which an edge gives up on a worker's reply."""

RESYNC_TIMEOUT_S = 2.0
RESYNC_PAUSE_S = 2.0
RESYNC_PAUSE_S_MAX = 30.0

_log = structlog.get_logger("headwater.fleet")


class LeaseReconciler:
    """Compares leases and decisions with the fold of one router."""

    def __init__(self, ports: Ports, pool: str, fleet: Writer) -> None:
        self._ports = ports
        self._pool = pool
        self._fleet = fleet
        self._live: dict[str, int] = {}
        self._known = asyncio.Event()
        self._missing: dict[tuple[str, int], int] = {}
        self._left: set[tuple[str, int]] = set()
        self._unaccepted: dict[tuple[str, int, str], float] = {}
        self._resync_at: dict[str, tuple[float, float]] = {}

    async def watch_leases(self) -> None:
        """Follow the lease table. Does not return."""
        async for changes in LeaseTable(self._ports.leases).watch():
            for kind, name, held in changes:
                if kind != "worker":
                    continue
                if held is None:
                    self._live.pop(name, None)
                elif held.pool == self._pool and held.epoch:
                    self._live[name] = held.epoch
                    # One that lapsed and was reclaimed may lapse again.
                    self._left.discard((name, held.epoch))
            self._known.set()

    async def wait_known(self) -> None:
        """Return once the lease table has been read."""
        await self._known.wait()

    def find_lapsed(self, state: RouterState) -> list[tuple[str, int]]:
        """Incarnations in the fold without a lease for `ROUNDS` calls whose leaving was not published yet."""
        missing = [
            (worker.name, worker.epoch)
            for worker in state.loads.workers.values()
            if self._live.get(worker.name) != worker.epoch
        ]
        self._missing = {incarnation: self._missing.get(incarnation, 0) + 1 for incarnation in missing}
        return [
            incarnation
            for incarnation, rounds in self._missing.items()
            if rounds >= ROUNDS and incarnation not in self._left
        ]

    def publish_left(self, incarnation: tuple[str, int]) -> None:
        """Publish to the log that a worker left."""
        worker, epoch = incarnation
        self._left.add(incarnation)
        _log.warning("worker_lease_lapsed", worker=worker, epoch=epoch, pool=self._pool)
        self._fleet.offer(WorkerLeft(worker, epoch, "lease lapsed"))

    def find_unsynced(self, state: RouterState) -> list[str]:
        """Live workers that are missing or cold in the fold, and whose reannouncement is due to be requested."""
        now = self._ports.clock.monotonic_s()
        workers = state.loads.workers
        unsynced = sorted(
            name
            for name, epoch in self._live.items()
            if name not in workers or workers[name].epoch != epoch or name in state.cold
        )
        self._resync_at = {
            name: self._resync_at.get(name, (now + PERIOD_S, RESYNC_PAUSE_S)) for name in unsynced
        }
        due = [name for name, (at, _) in self._resync_at.items() if at <= now]
        for name in due:
            _, pause_s = self._resync_at[name]
            self._resync_at[name] = (now + pause_s, min(2 * pause_s, RESYNC_PAUSE_S_MAX))
        return due

    def find_unaccepted(self, state: RouterState) -> list[DecisionVoided]:
        """Events that void decisions which were not accepted within `VOID_AFTER_S`; each is returned once.

        Measured by this router's clock since it folded them: the clocks of the deciding routers may differ.
        """
        now = self._ports.clock.monotonic_s()
        seen = {
            (worker.name, worker.epoch, request): self._unaccepted.get(
                (worker.name, worker.epoch, request), now
            )
            for worker in state.loads.workers.values()
            for request in worker.unaccepted
        }
        self._unaccepted = seen
        due = [key for key, since in seen.items() if now - since >= VOID_AFTER_S]
        for key in due:
            # Repeated only if the log does not deliver it.
            self._unaccepted[key] = now
        return [DecisionVoided(request, worker, epoch) for worker, epoch, request in due]

    async def request_resync(self, worker: str) -> None:
        """Request a worker to reannounce itself and its cache."""
        _log.warning("resync_requested", worker=worker, pool=self._pool)
        subject = subjects.resync(self._ports.ns, worker)
        try:
            await self._ports.bus.request(subject, b"", timeout_s=RESYNC_TIMEOUT_S)
        except BusError as error:
            _log.warning("resync_unanswered", worker=worker, reason=str(error))
