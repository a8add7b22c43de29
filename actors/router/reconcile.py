"""Reconciliation of leases, decisions and the fold.

    in the fold, no lease      the worker left: publish that to the log
    lease, not in the fold     the log lost its joining: request it to reannounce itself
    lease, cold in the fold    the log lost some of its events: request it to reannounce its cache
    decided, never accepted    no worker will accept it any more: publish that to the log

Every difference is evaluated periodically, so a request that was lost is repeated.
"""

import asyncio

import structlog

from headwater.actors.bus.port import BusError
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import LeaseTable
from headwater.events.writer import Writer
from headwater.router.fold.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.events.fleet import WorkerLeft
from headwater.schemas.events.route import DecisionVoided

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
        self._missing = {one: self._missing.get(one, 0) + 1 for one in missing}
        return [one for one, rounds in self._missing.items() if rounds >= ROUNDS and one not in self._left]

    def publish_left(self, incarnation: tuple[str, int]) -> None:
        """Publish to the log that a worker left."""
        worker, epoch = incarnation
        self._left.add(incarnation)
        _log.warning("worker_lease_lapsed", worker=worker, epoch=epoch, pool=self._pool)
        self._fleet.offer(WorkerLeft(worker, epoch, "lease lapsed"))

    def find_unsynced(self, state: RouterState) -> list[str]:
        """Live workers missing or cold in the fold, of which a reannouncement is due to be requested."""
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
