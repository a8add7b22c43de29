"""The router's queue on virtual time: the production rules of who is busy, who must wait and whose turn it is.

What the actor adds to them (how edges ask while they wait) takes no time here.
"""

from typing import NamedTuple

import msgspec

from headwater.ops.whatif.routing import Question, Routing
from headwater.ops.whatif.setup import Setup
from headwater.router.admission import AllBusy, Fleet, admit, first_token_s, uncached_tokens
from headwater.router.busy import BusyLimits, busy_lives
from headwater.router.waiting import QueueLimits, Turned, WaitingRoom
from headwater.router.waiting_lines import Shape, shape_of
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

LOOK_NS = 250_000_000
"""How often a router looks who waited for too long."""


class Answered(NamedTuple):
    """A question that waited, and what came of it."""

    question: Question
    answer: Decision | RouteRefused


class Door:
    """See the module. Where no limit of `setup` is set nothing ever waits."""

    def __init__(self, routing: Routing, setup: Setup) -> None:
        self._routing = routing
        self._busy = BusyLimits(setup.busy_prefill_tokens, setup.busy_kv, setup.busy_waiting)
        self._room = WaitingRoom(QueueLimits(wait_s=setup.queue_wait_s, order=setup.queue_order))
        self._questions: dict[str, Question] = {}
        self._looked_ns = 0

    def __len__(self) -> int:
        """How many questions wait."""
        return len(self._room)

    def ask(self, question: Question, now_ns: int) -> Decision | RouteRefused | None:
        """Where a request goes; None for one that waits. A second leg does not wait again."""
        query = self._routing.query_of(question)
        waits = not question.asked
        verdict: Decision | RouteRefused | AllBusy
        if waits and self._room.has_shape(shape_of(query)):
            # Others that need the same wait already, and it must not overtake them.
            verdict = self._routing.choose(query, now_ns)
            verdict = AllBusy(verdict) if isinstance(verdict, Decision) else verdict
        else:
            verdict = self._verdict(query, now_ns, self._lives(now_ns))
        if isinstance(verdict, AllBusy):
            if waits:
                return self._park(question, query, verdict.anyway, now_ns)
            verdict = verdict.anyway
        return self._routing.commit(verdict, now_ns) if isinstance(verdict, Decision) else verdict

    def turn(self, now_ns: int) -> list[Answered]:
        """The fold moved: what waits no longer, in the order of the queue."""
        found: list[Answered] = []
        if now_ns - self._looked_ns >= LOOK_NS:
            self._looked_ns = now_ns
            for one, turned in self._room.overdue(now_ns / 1e9):
                self._room.drop(one.query.request, now_ns / 1e9)
                found.append(Answered(self._questions.pop(one.query.request), turned.refused))
        blocked: set[Shape] = set()
        while self._room:
            busy = self._lives(now_ns)
            everyone = Fleet.of(self._routing.state.loads).all_busy(set(busy))
            one_ = None if everyone else self._room.first(blocked)
            if one_ is None:
                break
            verdict = self._verdict(one_.query, now_ns, busy)
            if isinstance(verdict, AllBusy):
                blocked.add(one_.shape)
                continue
            if isinstance(verdict, Decision):
                waited_ms = max(1, round(now_ns / 1e6 - one_.arrived_s * 1e3))
                self._room.serve(one_, now_ns / 1e9)
                verdict = self._routing.commit(msgspec.structs.replace(verdict, waited_ms=waited_ms), now_ns)
            else:
                self._room.drop(one_.query.request, now_ns / 1e9)
            found.append(Answered(self._questions.pop(one_.query.request), verdict))
        return found

    def _lives(self, now_ns: int) -> tuple[str, ...]:
        return busy_lives(self._routing.state.loads, now_ns, self._busy)

    def _verdict(
        self, query: RouteQuery, now_ns: int, busy: tuple[str, ...]
    ) -> Decision | RouteRefused | AllBusy:
        return admit(
            lambda asked: self._routing.choose(asked, now_ns), self._routing.state.loads, query, busy
        )

    def _park(
        self, question: Question, query: RouteQuery, anyway: Decision, now_ns: int
    ) -> RouteRefused | None:
        placed = self._room.put(
            query,
            now_ns / 1e9,
            uncached_tokens=uncached_tokens(anyway, self._routing.state.loads),
            serve_s=first_token_s(anyway, queued=False),
        )
        if isinstance(placed, Turned):
            return placed.refused
        self._questions[question.name] = question
        return None
