"""Queries that wait while every worker that could take them is busy: who is admitted, who waits, whose turn it is.

One implementation for a live router and for what-if. Pure but for what it is given: deciding and committing are the
caller's, and so is time (`monotonic_s` for waiting, `wall_ns` for estimates).

    admit      decide a query at once, let it wait, or refuse it
    pump       whoever can be served now, in the order of the room
    overdue    those that waited for too long, or whose deadline can not be met any more
    moved      the fold moved; without that for `SILENCE_S` nobody is known to be busy, and nothing waits
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from headwater.router.admission import AllBusy, Fleet, Stuck, admit, first_token_s, uncached_tokens
from headwater.router.busy import BusyLimits, busy_lives
from headwater.router.load import Loads
from headwater.router.waiting import QueueLimits, Turned, WaitingRoom
from headwater.router.waiting_lines import Shape, Waiting, shape_of
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

SILENCE_S: Final = 3.0
"""Every worker tells its load once a second. After so long without a word nobody is known to be busy."""

STUCK_MAX: Final = 1_024
"""Shapes of queries remembered for which nobody was free."""

Choose = Callable[[RouteQuery], Decision | RouteRefused]
Commit = Callable[[Decision], Decision]


class QueueSettings(NamedTuple):
    """When a worker is busy (by default never, so that nothing waits), and the queue's bounds."""

    busy: BusyLimits = BusyLimits()
    limits: QueueLimits = QueueLimits()


class Now(NamedTuple):
    """The time as its caller knows it."""

    monotonic_s: float
    wall_ns: int


class Admitted(NamedTuple):
    """What became of a query: a decision, a refusal with the queue's `reason` if it is one of the queue's, or None: it waits."""

    reply: Decision | RouteRefused | None
    reason: str = ""


class Left(NamedTuple):
    """A query that waits no longer; `reason` is empty for one that was served."""

    waiting: Waiting
    reply: Decision | RouteRefused
    reason: str = ""


class AdmissionQueue:
    """See the module. `choose` decides and changes nothing; `commit` applies what was just chosen."""

    def __init__(
        self,
        settings: QueueSettings,
        loads: Callable[[], Loads],
        choose: Choose,
        commit: Commit,
        now: Callable[[], Now],
    ) -> None:
        self.room = WaitingRoom(settings.limits)
        self._busy = settings.busy
        self._loads = loads
        self._choose = choose
        self._commit = commit
        self._now = now
        self._stuck: dict[Shape, Stuck] = {}
        self._moved_s = now().monotonic_s

    @property
    def silent(self) -> bool:
        """Has the fold not moved for so long that nobody is known to be busy?"""
        return self._now().monotonic_s - self._moved_s > SILENCE_S

    def moved(self) -> None:
        """The fold moved."""
        self._moved_s = self._now().monotonic_s

    def busy_lives(self) -> tuple[str, ...]:
        """Lives of workers that are busy."""
        return () if self.silent else busy_lives(self._loads(), self._now().wall_ns, self._busy)

    def admit(self, query: RouteQuery) -> Admitted:
        """Decide a query, or let it wait, or refuse it."""
        verdict: Decision | RouteRefused | AllBusy
        if query.waits and self.room.has_shape(shape_of(query)):
            # Others that need the same wait already: nobody could take it, and it must not overtake them.
            verdict = self._choose(query)
            verdict = AllBusy(verdict) if isinstance(verdict, Decision) else verdict
        else:
            verdict = self._verdict(query, self.busy_lives())
        if isinstance(verdict, AllBusy):
            if query.waits:
                return self._park(query, verdict.anyway)
            verdict = verdict.anyway
        if isinstance(verdict, RouteRefused):
            return Admitted(verdict)
        late = self._late(query, verdict, 0.0)
        if late is not None:
            return Admitted(late.refused, late.reason)
        return Admitted(self._commit(verdict))

    def pump(self, served_max: int) -> tuple[list[Left], bool]:
        """Serve whoever can be served now, in their order, at most so many; True if there may be more."""
        found: list[Left] = []
        if not self.room:
            return found, False
        now_s = self._now().monotonic_s
        fleet, busy = Fleet.of(self._loads()), self.busy_lives()
        if len(self._stuck) > STUCK_MAX:
            self._stuck.clear()
        blocked: set[Shape] = set()
        while len(found) < served_max:
            one = None if fleet.all_busy(set(busy)) else self.room.first(blocked)
            if one is None:
                return found, False
            stuck = self._stuck.get(one.shape)
            if stuck is not None and stuck.holds(fleet, set(busy)):
                blocked.add(one.shape)
                continue
            verdict = self._verdict(one.query, busy)
            if isinstance(verdict, AllBusy):
                blocked.add(one.shape)
                self._stuck[one.shape] = Stuck.of(fleet, verdict)
                continue
            found.append(self._take(one, verdict, now_s))
            busy = self.busy_lives()
        return found, True

    def overdue(self) -> list[Left]:
        """Those whose deadline can not be met any more, and those that waited for as long as one may."""
        now_s = self._now().monotonic_s
        found = [Left(one, turned.refused, turned.reason) for one, turned in self.room.overdue(now_s)]
        for left in found:
            self.drop(left.waiting.query.request)
        return found

    def drop(self, request: str) -> None:
        """A query leaves without being served."""
        self.room.drop(request, self._now().monotonic_s)

    def _take(self, one: Waiting, verdict: Decision | RouteRefused, now_s: float) -> Left:
        waited_s = now_s - one.arrived_s
        if isinstance(verdict, RouteRefused):
            # Those who could have taken it are gone: as for any query, the edge decides how often it asks.
            self.drop(one.query.request)
            return Left(one, verdict, "no_worker")
        late = self._late(one.query, verdict, waited_s)
        if late is not None:
            self.drop(one.query.request)
            return Left(one, late.refused, late.reason)
        self.room.serve(one, now_s)
        decision = msgspec.structs.replace(verdict, waited_ms=max(1, round(waited_s * 1_000)))
        return Left(one, self._commit(decision))

    def _verdict(self, query: RouteQuery, busy: tuple[str, ...]) -> Decision | RouteRefused | AllBusy:
        return admit(self._choose, self._loads(), query, busy)

    def _late(self, query: RouteQuery, decision: Decision, waited_s: float) -> Turned | None:
        serve_s = first_token_s(decision, queued=True)
        if not query.deadline_ms or waited_s + serve_s <= query.deadline_ms / 1_000.0:
            return None
        return self.room.cannot_meet(query, 0.0, serve_s, waited_s)

    def _park(self, query: RouteQuery, anyway: Decision) -> Admitted:
        placed = self.room.put(
            query,
            self._now().monotonic_s,
            uncached_tokens=uncached_tokens(anyway, self._loads()),
            serve_s=first_token_s(anyway, queued=False),
        )
        return Admitted(placed.refused, placed.reason) if isinstance(placed, Turned) else Admitted(None)
