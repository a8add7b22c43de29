"""The router's admission queue on virtual time: the production queue, driven by the replay's clock.

What the actor adds to it (long polls of edges) takes no time here.
"""

from typing import Final, NamedTuple

from headwater.ops.whatif.routing.router import Question, VirtualRouter
from headwater.ops.whatif.routing.setup import RoutersSetup
from headwater.router.queue.admission_queue import AdmissionQueue, Now, Released
from headwater.schemas.events.route import Decision, RouteRefused

TICK_NS: Final = 250_000_000
"""How often expired queries are looked for, as in the router."""

SERVED_MAX: Final = 1 << 30
"""No bound: nothing else runs between two decisions of a replay."""


class Answered(NamedTuple):
    """A question that waited, and its answer."""

    question: Question
    answer: Decision | RouteRefused


class QueueModel:
    """See the module. Without saturation limits in the scenario nothing ever waits."""

    def __init__(self, router: VirtualRouter, setup: RoutersSetup) -> None:
        self._router = router
        self._queue = AdmissionQueue(setup.queue, router, _time(0))
        self._questions: dict[str, Question] = {}
        self._expired_ns = 0
        self._displaced: list[Released] = []

    def __len__(self) -> int:
        """The number of questions that wait."""
        return len(self._queue.waiting)

    def offer(self, question: Question, now_ns: int) -> Decision | RouteRefused | None:
        """Where a request goes; None if it waits. A second leg never waits."""
        now = self._set_time(now_ns)
        offered = self._queue.offer(self._router.query_of(question), now)
        self._displaced += offered.displaced
        if offered.reply is None:
            self._questions[question.name] = question
        return offered.reply

    def advance(self, now_ns: int) -> list[Answered]:
        """Questions that no longer wait, in the order of the queue. Call after the fold advanced."""
        now = self._set_time(now_ns)
        released, self._displaced = self._displaced, []
        if now_ns - self._expired_ns >= TICK_NS:
            self._expired_ns = now_ns
            released += self._queue.expire(now)
        released += self._queue.advance(now, SERVED_MAX)[0]
        return [Answered(self._questions.pop(one.queued.query.request), one.reply) for one in released]

    def _set_time(self, now_ns: int) -> Now:
        self._router.read(now_ns)
        now = _time(now_ns)
        # Simulated workers report every second, so the log is never silent.
        self._queue.note_fold_advanced(now)
        return now


def _time(now_ns: int) -> Now:
    return Now(now_ns / 1e9, now_ns)
