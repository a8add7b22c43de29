"""Do several routers decide as a single one would? Each decision is made a second time, by a router that sees everything at once."""

from headwater.ops.whatif.routing.log import VirtualLog
from headwater.ops.whatif.routing.router import VirtualRouter
from headwater.ops.whatif.routing.setup import RoutersSetup
from headwater.schemas.events.route import Decision, RouteQuery


class Agreement:
    """All decisions compared with those of a single router that reads every message and decision without delay.

    `different`: of the `decisions`, those for another worker. `unseen_total` and `unseen_max`: decisions of other routers that the
    one that decided had not read.
    """

    def __init__(self, setup: RoutersSetup, log: VirtualLog) -> None:
        self.decisions = self.different = self.unseen_total = self.unseen_max = 0
        self._single = VirtualRouter("single", setup, log, log.reader(0))

    def check(self, query: RouteQuery, decision: Decision, router: VirtualRouter) -> None:
        """See `DecisionCheck`."""
        self._single.read(router.now_ns)
        other = self._single.choose(query)
        self.decisions += 1
        self.different += not isinstance(other, Decision) or other.worker != decision.worker
        self.unseen_total += router.unseen
        self.unseen_max = max(self.unseen_max, router.unseen)
