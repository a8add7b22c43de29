"""A router is killed and returns from a snapshot and the log; a twin that lives on shows how it would have decided."""

import msgspec

from headwater.events.snapshots.store import Snapshot
from headwater.ops.whatif.routing.log import LogReader, VirtualLog
from headwater.ops.whatif.routing.router import VirtualRouter
from headwater.ops.whatif.routing.setup import RoutersSetup
from headwater.router.fold.state import RouterState
from headwater.schemas.events.route import Decision, RouteQuery

AWAY_NS = 250_000_000
"""From the kill to the return."""


class Restart:
    """See the module. The snapshot is taken half way to the kill, as soon as the log holds all decisions of the router.
    Queries in its queue are still answered when it is killed: an edge would ask another router.

    `states_equal`: at its return it had the state of the twin. `decisions`: those made since, of which `different` differ from
    the twin's in their worker, a cost or the position.
    """

    def __init__(self, setup: RoutersSetup, log: VirtualLog, twin: VirtualRouter) -> None:
        self.decisions = self.different = 0
        self.returned = self.states_equal = False
        self._kill_ns = setup.kill_ns
        self._setup = setup
        self._log = log
        self._twin = twin
        self._snapshot: Snapshot | None = None
        self._tail: LogReader | None = None

    def is_away(self, now_ns: int) -> bool:
        """Is the router killed and not back yet?"""
        if self._tail is None and now_ns >= self._kill_ns // 2:
            self._save(now_ns)
        return self._tail is not None and self._kill_ns <= now_ns and not self.returned

    def _save(self, now_ns: int) -> None:
        self._twin.read(now_ns)
        if self._twin.settled:
            self._snapshot = self._twin.state.snapshot()
            self._tail = self._log.copy(self._twin.reader)

    def successor(self, now_ns: int) -> VirtualRouter | None:
        """The next incarnation, when it is time for its return."""
        if self.returned or self._snapshot is None or self._tail is None or now_ns < self._kill_ns + AWAY_NS:
            return None
        self._twin.read(now_ns)
        if not self._twin.settled:
            return None
        router = VirtualRouter("returned", self._setup, self._log, self._tail)
        router.state = RouterState.restore(self._snapshot)
        router.read(now_ns)
        self.returned = True
        self.states_equal = router.state.digest() == self._twin.state.digest()
        self._twin.own.add("returned")
        router.checks = [*self._twin.checks, self]
        return router

    def check(self, query: RouteQuery, decision: Decision, router: VirtualRouter) -> None:
        """See `DecisionCheck`."""
        self._twin.read(router.now_ns)
        other = self._twin.choose(query)
        self.decisions += 1
        self.different += not isinstance(other, Decision) or _facts(other) != _facts(decision)
        self._twin.apply_own(decision)


def _facts(decision: Decision) -> Decision:
    """A decision without what counts the decisions of its router."""
    return msgspec.structs.replace(decision, number=0, seen=0)
