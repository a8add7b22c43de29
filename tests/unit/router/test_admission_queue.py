"""The admission queue as a whole, on a fold of events: deadlines of what it serves."""

import msgspec

from headwater.router.admission import AdmissionQueue, Now
from headwater.router.queue import BusyLimits, QueueLimits, QueueSettings
from headwater.schemas.events import LoadReported
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.worlds.clock import WALL_NS
from tests.unit.router.test_admission import Told

PREFILL_S = 2.0


class Router(Told):
    """Decides on a fold; each prefill takes `PREFILL_S`."""

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """See `admission.Router`."""
        made = super().choose(query)
        if isinstance(made, RouteRefused):
            return made
        slow = tuple(msgspec.structs.replace(one, prefill_ms=PREFILL_S * 1_000) for one in made.candidates)
        return msgspec.structs.replace(made, candidates=slow)

    def commit(self, decision: Decision) -> Decision:
        """See `admission.Router`."""
        self.log(decision)
        return decision


def query(deadline_ms: int) -> RouteQuery:
    """One that may wait."""
    return route_query("a", 64, 8, packed(1, 2, 3, 4), waits=True, deadline_ms=deadline_ms)


def test_time_in_the_queue_counts_against_the_deadline() -> None:
    """Of 5 s, 2 of them for the prefill: after 2 s it is served, after 3.5 s it is refused although a worker is free."""
    for waited_s, served in ((2.0, True), (3.5, False)):
        router = Router(w1="both")
        router.give("w1", 1_600)
        start = Now(10.0, WALL_NS)
        queue = AdmissionQueue(QueueSettings(BusyLimits(prefill_tokens=1_000), QueueLimits()), router, start)
        assert queue.offer(query(deadline_ms=5_000), start).reply is None
        requests = tuple(router.state.loads.workers["w1"].requests)
        router.log(LoadReported(0, 0, 0, 100, accepted=requests, prefilled=requests), "w1")
        now = Now(10.0 + waited_s, WALL_NS)
        queue.note_fold_advanced(now)
        [released], _ = queue.advance(now, 8)
        assert isinstance(released.reply, Decision) == served
        assert released.reason == ("" if served else "deadline")
