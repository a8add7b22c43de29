"""What a router does where leases, decisions and the fold disagree.

    in the fold, no lease      it has left: put that into the log
    lease, not in the fold     the log lost its joining: ask it to announce itself
    lease, cold in the fold    the log lost some of what it said: ask it to announce its cache
    decided, never accepted    nobody will accept it any more: put that into the log

All three are looked at again and again rather than acted on once: a question that got lost is simply asked later.
"""

import asyncio

import structlog

from headwater.actors.bus_port import BusError
from headwater.actors.lease import decode_lease
from headwater.actors.world import World
from headwater.events.writer import Writer
from headwater.router.state import RouterState
from headwater.schemas import subjects
from headwater.schemas.fleet import WorkerLeft
from headwater.schemas.route import DecisionVoided

PERIOD_S = 0.5
ROUNDS = 2
"""How often in a row a disagreement must be seen: joining and lease do not come in the same moment."""

VOID_AFTER_S = 15.0
"""Far beyond the time after which an edge gives up on a worker's answer."""

RESYNC_TIMEOUT_S = 2.0
ASK_AGAIN_S = 2.0
ASK_AGAIN_S_MAX = 30.0

_log = structlog.get_logger("headwater.fleet")


class FleetWatch:
    """Compares leases with the fold of one router. `state` gives the present one."""

    def __init__(self, world: World, pool: str, fleet: Writer) -> None:
        self._world = world
        self._pool = pool
        self._fleet = fleet
        self._live: dict[str, int] = {}
        self._known = asyncio.Event()
        self._seen: dict[tuple[str, int], int] = {}
        self._left: set[tuple[str, int]] = set()
        self._unaccepted: dict[tuple[str, int, str], float] = {}
        self._ask_at: dict[str, tuple[float, float]] = {}

    async def watch_leases(self) -> None:
        """Follow the lease table for ever."""
        async for entries in self._world.leases.watch():
            for entry in entries:
                kind, _, name = entry.key.partition(".")
                if kind != "worker":
                    continue
                held = decode_lease(entry)
                if held is None:
                    self._live.pop(name, None)
                elif held.pool == self._pool and held.epoch:
                    self._live[name] = held.epoch
                    # One that lapsed and was reclaimed may lapse again.
                    self._left.discard((name, held.epoch))
            self._known.set()

    async def known(self) -> None:
        """Return once the leases are known."""
        await self._known.wait()

    def gone(self, state: RouterState) -> list[tuple[str, int]]:
        """Lives in the fold whose lease has been missing for `ROUNDS` calls and that were not told of yet."""
        missing = [
            (worker.name, worker.epoch)
            for worker in state.loads.workers.values()
            if self._live.get(worker.name) != worker.epoch
        ]
        self._seen = {life: self._seen.get(life, 0) + 1 for life in missing}
        return [life for life, rounds in self._seen.items() if rounds >= ROUNDS and life not in self._left]

    def tell_left(self, life: tuple[str, int]) -> None:
        """Put into the log that a life is over."""
        self._left.add(life)
        _log.warning("worker_lease_lapsed", worker=life[0], epoch=life[1], pool=self._pool)
        self._fleet.offer(WorkerLeft(life[0], life[1], "lease lapsed"))

    def doubtful(self, state: RouterState) -> list[str]:
        """Live workers that the fold does not know, or does not trust, and that may be asked now."""
        now = self._world.clock.monotonic_s()
        workers = state.loads.workers
        doubted = sorted(
            name
            for name, epoch in self._live.items()
            if name not in workers or workers[name].epoch != epoch or name in state.cold
        )
        self._ask_at = {name: self._ask_at.get(name, (now + PERIOD_S, ASK_AGAIN_S)) for name in doubted}
        due = [name for name, (at, _) in self._ask_at.items() if at <= now]
        for name in due:
            _, pause_s = self._ask_at[name]
            self._ask_at[name] = (now + pause_s, min(2 * pause_s, ASK_AGAIN_S_MAX))
        return due

    def stale(self, state: RouterState) -> list[DecisionVoided]:
        """Decisions that this router has seen unaccepted for `VOID_AFTER_S`; each is told once.

        By its own clock from when it saw them: the wall clock of whoever decided may be anything.
        """
        now = self._world.clock.monotonic_s()
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
            # Again only if the log does not bring it back.
            self._unaccepted[key] = now
        return [DecisionVoided(request, worker, epoch) for worker, epoch, request in due]

    async def ask_resync(self, worker: str) -> None:
        """Ask a worker to announce itself and its cache anew."""
        _log.warning("resync_asked", worker=worker, pool=self._pool)
        subject = subjects.resync(self._world.ns, worker)
        try:
            await self._world.bus.request(subject, b"", timeout_s=RESYNC_TIMEOUT_S)
        except BusError as error:
            _log.warning("resync_unanswered", worker=worker, reason=str(error))
