"""The router's queue on virtual time: the production queue, driven by a clock of the replay's own.

What the actor adds to it (how edges ask while they wait) takes no time here.
"""

from typing import Final, NamedTuple

from headwater.ops.whatif.routing import Question, Routing
from headwater.ops.whatif.setup import Setup
from headwater.router.admission_queue import AdmissionQueue, Now, QueueSettings
from headwater.router.busy import BusyLimits
from headwater.router.waiting import QueueLimits
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

LOOK_NS: Final = 250_000_000
"""How often a router looks who waited for too long."""

SERVED_MAX: Final = 1 << 30
"""A replay has nobody else to let in between."""


class Answered(NamedTuple):
    """A question that waited, and what came of it."""

    question: Question
    answer: Decision | RouteRefused


class Door:
    """See the module. Where no limit of `setup` is set nothing ever waits."""

    def __init__(self, routing: Routing, setup: Setup) -> None:
        self._routing = routing
        self._now_ns = 0
        self._queue = AdmissionQueue(
            QueueSettings(
                BusyLimits(setup.busy_prefill_tokens, setup.busy_kv, setup.busy_waiting),
                QueueLimits(wait_s=setup.queue_wait_s, order=setup.queue_order),
            ),
            lambda: routing.state.loads,
            self._choose,
            lambda decision: routing.commit(decision, self._now_ns),
            lambda: Now(self._now_ns / 1e9, self._now_ns),
        )
        self._questions: dict[str, Question] = {}
        self._looked_ns = 0

    def _choose(self, query: RouteQuery) -> Decision | RouteRefused:
        return self._routing.choose(query, self._now_ns)

    def __len__(self) -> int:
        """How many questions wait."""
        return len(self._queue.room)

    def ask(self, question: Question, now_ns: int) -> Decision | RouteRefused | None:
        """Where a request goes; None for one that waits. A second leg does not wait again."""
        self._now_ns = now_ns
        # Simulated workers report all the time: nothing here is silence.
        self._queue.moved()
        reply = self._queue.admit(self._routing.query_of(question)).reply
        if reply is None:
            self._questions[question.name] = question
        return reply

    def turn(self, now_ns: int) -> list[Answered]:
        """The fold moved: what waits no longer, in the order of the queue."""
        self._now_ns = now_ns
        self._queue.moved()
        left = []
        if now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            left += self._queue.overdue()
        left += self._queue.pump(SERVED_MAX)[0]
        return [Answered(self._questions.pop(one.query.request), reply) for one, reply, _ in left]
