"""Another policy beside the one that decides: each decision of the log is made again with it, on the same state. Pure.

A decision is stored some moments after it was made, on a fold that had read less. So messages are read first and folded
later, when the decisions made before them are known: whoever calls `read` and `fold` says how much later. On that fold
the view of the router that decided is rebuilt as for a replay, the shadow decides, and a judge says what each choice
costs. What the log tells still later, what the engine had of the prompt and when the first token came, is held against
what the decision foresaw.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from headwater.events.log import Record, Unreadable
from headwater.router.decide import CannotRecompute, recompute
from headwater.router.index import PrefixIndex
from headwater.router.load import Loads
from headwater.router.replay import Difference, Life, Recorded, Replay
from headwater.router.state import RouterState
from headwater.schemas.load import LoadReported
from headwater.schemas.route import Decision, RouteRefused, Shadowed

VIEWS_MAX: Final = 16
"""Lives of routers whose views are kept; one that is forgotten is copied anew."""

AWAITED_MAX: Final = 20_000
"""Decisions whose prompt is still to be computed; the oldest is forgotten first."""

Again = Callable[[PrefixIndex, Loads, set[str], Decision], Decision | RouteRefused]


class Errors(msgspec.Struct):
    """What was foreseen beside what came: sums over `count` decisions, and the sum of the absolute differences."""

    count: int = 0
    foreseen: float = 0.0
    came: float = 0.0
    missed: float = 0.0

    def add(self, foreseen: float, came: float) -> None:
        """One more."""
        self.count += 1
        self.foreseen += foreseen
        self.came += came
        self.missed += abs(foreseen - came)


class Tally(msgspec.Struct):
    """So far. Regrets are sums of costs above the least, by the judge.

    `late` decisions were stored too long after they were made, `unjudged` ones can not be made again or got no worker.
    """

    judged: int = 0
    agreed: int = 0
    regret_chosen: float = 0.0
    regret_shadow: float = 0.0
    late: int = 0
    unjudged: int = 0
    cached_tokens: Errors = msgspec.field(default_factory=Errors)
    first_token_s: Errors = msgspec.field(default_factory=Errors)


class ShadowFold(Replay):
    """See the module. `done` names requests of decisions that were judged before, under the same name."""

    def __init__(
        self,
        state: RouterState,
        policy: str,
        judge: str,
        *,
        done: Iterable[str] = (),
        again: Again = recompute,
    ) -> None:
        super().__init__(state, [])
        self.tally = Tally()
        self._policy = policy
        self._judge = judge
        self._done = set(done)
        self._again_by = again
        self._found: list[Shadowed] = []
        self._awaited: OrderedDict[tuple[str, int, str], tuple[Recorded, int]] = OrderedDict()

    def read(self, message: Record | Unreadable) -> None:
        """A message of the log, to be folded later: what it holds of decisions is needed before."""
        if isinstance(message, Unreadable):
            return
        life = (message.batch.writer, message.batch.epoch)
        for event in message.batch.events:
            if not isinstance(event, Decision):
                continue
            if event.position < self.state.position:
                self.tally.late += 1
            else:
                self.expect(Recorded(life, event, message.stored_ns))

    def judge(self) -> list[Shadowed]:
        """Judge what was decided at the present position, as far as it is known."""
        self._check(self.state.position)
        found, self._found = self._found, []
        return found

    def advance(self, message: Record | Unreadable) -> list[Shadowed]:
        """Judge what was decided at the present position, then fold the next message."""
        found = self.judge()
        if isinstance(message, Record):
            for event in message.batch.events:
                if isinstance(event, LoadReported):
                    self._compare(message, event)
        self.fold(message)
        return found

    def _view(self, recorded: Recorded) -> Loads | None:
        loads = super()._view(recorded)
        if loads is None and self._views.pop(recorded.life, None) is not None:
            # One of its decisions is not in the log. Where all before this one are, the plain fold is its view.
            loads = super()._view(recorded)
        self.tally.unjudged += loads is None
        return loads

    def _made(self, recorded: Recorded, loads: Loads) -> None:
        """Whether this life decides again is not known here: its view is kept, the one used last behind the others."""
        self._views.pop(recorded.life, None)
        for life in [life for life in self._views if _succeeded(life, recorded.life)]:
            del self._views[life]
        if len(self._views) >= VIEWS_MAX:
            del self._views[next(iter(self._views))]
        self._views[recorded.life] = (loads, recorded.decision.number)

    def _again(self, loads: Loads, recorded: Recorded) -> Difference | None:
        decision = recorded.decision
        if decision.request in self._done:
            self._done.discard(decision.request)
            return None
        shadowed = self._shadow(loads, decision)
        if shadowed is None:
            self.tally.unjudged += 1
            return None
        tally = self.tally
        tally.judged += 1
        tally.agreed += shadowed.worker == shadowed.chosen
        tally.regret_chosen += shadowed.chosen_score - shadowed.least
        tally.regret_shadow += shadowed.score - shadowed.least
        self._found.append(shadowed)
        worker = loads.current(decision.worker, decision.epoch)
        if worker is not None and decision.leg != "decode":
            self._awaited[decision.worker, decision.epoch, decision.request] = (recorded, worker.block_size)
            if len(self._awaited) > AWAITED_MAX:
                self._awaited.popitem(last=False)
        return None

    def _shadow(self, loads: Loads, decision: Decision) -> Shadowed | None:
        """What the policy would have done, None where it or the judge has no answer."""
        mine = self._by(self._policy, loads, decision)
        judged = mine if self._judge == self._policy else self._by(self._judge, loads, decision)
        if mine is None or judged is None:
            return None
        score = _score(judged, mine)
        chosen_score = _score(judged, decision)
        if score is None or chosen_score is None:
            return None
        least = min(candidate.score for candidate in judged.candidates)
        return Shadowed(
            decision.request,
            self._policy,
            mine.worker,
            decision.worker,
            self._judge,
            score,
            chosen_score,
            least,
        )

    def _by(self, policy: str, loads: Loads, decision: Decision) -> Decision | None:
        # Without a temperature: what the policy holds for best, and no draw.
        asked = msgspec.structs.replace(decision, policy=policy, temperature=0.0)
        try:
            again = self._again_by(self.state.index, loads, self.state.cold, asked)
        except CannotRecompute:
            return None
        return None if isinstance(again, RouteRefused) else again

    def _compare(self, record: Record, report: LoadReported) -> None:
        """Hold what decisions foresaw against what a worker says."""
        for request, cached in zip(report.prefilled, report.cached, strict=False):
            awaited = self._awaited.pop((record.batch.writer, record.batch.epoch, request), None)
            if awaited is None:
                continue
            recorded, block_size = awaited
            decision, chosen = recorded.decision, recorded.decision.chosen
            if cached >= 0:
                foreseen = min(chosen.cached_blocks * block_size, decision.prompt_tokens - 1)
                self.tally.cached_tokens.add(foreseen, cached)
            foreseen_ms = chosen.queue_ms + chosen.prefill_ms
            if foreseen_ms > 0:
                # Both as the log's server has them: one clock.
                self.tally.first_token_s.add(
                    foreseen_ms / 1000, max(0.0, (record.stored_ns - recorded.stored_ns) / 1e9)
                )


def _score(judged: Decision, choice: Decision) -> float | None:
    """What a choice costs by the judge, None if it is no candidate of its."""
    same = [candidate for candidate in judged.candidates if candidate.worker == choice.worker]
    of_leg = [candidate.score for candidate in same if candidate.leg == choice.leg]
    return min(of_leg or [candidate.score for candidate in same], default=None)


def _succeeded(life: Life, by: Life) -> bool:
    return life[0] == by[0] and life[1] < by[1]
