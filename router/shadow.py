"""The shadow policy: recomputes each decision of the log with another policy, on the same state. Pure.

A decision is stored some time after it was made, on a fold that had read less. So messages are read first and folded
later, when the decisions made before them are known; the caller of `read` and `advance` chooses the delay. On that fold
the deciding router's view is rebuilt as for a replay, the shadow policy decides, and the judge policy scores
both choices. Later load reports give the cached tokens and the time to the first token, which are compared with the
decision's estimates.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from headwater.events.ports import Record, Unreadable
from headwater.router.decision.candidates import Candidates
from headwater.router.decision.decide import CannotRecompute, Evaluation, reevaluate, with_policy
from headwater.router.fold.load import Loads
from headwater.router.fold.state import RouterState
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.replay import Difference, Incarnation, Recorded, Replay
from headwater.schemas.events.fleet import LoadReported
from headwater.schemas.events.route import Decision, RouteRefused, Shadowed

VIEWS_MAX: Final = 16
"""Incarnations of routers whose views are kept. A dropped view is copied again from the plain fold."""

PENDING_MAX: Final = 20_000
"""Decisions kept until their prompt is computed; the oldest is dropped first."""

Reevaluate = Callable[[PrefixIndex, Loads, set[str], Decision], Evaluation | RouteRefused]


class Errors(msgspec.Struct):
    """Estimates against measurements: sums over `count` decisions, and the sum of the absolute errors."""

    count: int = 0
    estimated: float = 0.0
    measured: float = 0.0
    absolute_error: float = 0.0

    def add(self, estimated: float, measured: float) -> None:
        """Add one decision."""
        self.count += 1
        self.estimated += estimated
        self.measured += measured
        self.absolute_error += abs(estimated - measured)


class Tally(msgspec.Struct):
    """Results so far. Regret is the sum of costs above the lowest, as the judge scores them.

    `late` decisions were stored too long after they were made; `unjudged` ones could not be recomputed, or no worker was found.
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
    """The fold of a shadow router. `done` lists requests whose decisions were judged before, under the same name."""

    def __init__(
        self,
        state: RouterState,
        policy: str,
        judge: str,
        *,
        done: Iterable[str] = (),
        reevaluate: Reevaluate = reevaluate,
    ) -> None:
        super().__init__(state, [])
        self.tally = Tally()
        self._policy = policy
        self._judge = judge
        self._done = set(done)
        self._reevaluate = reevaluate
        self._found: list[Shadowed] = []
        self._pending: OrderedDict[tuple[str, int, str], tuple[Recorded, int]] = OrderedDict()

    def read(self, message: Record | Unreadable) -> None:
        """Take the decisions out of a message that is folded later."""
        if isinstance(message, Unreadable):
            return
        incarnation = (message.batch.writer, message.batch.epoch)
        for event in message.batch.events:
            if not isinstance(event, Decision):
                continue
            if event.position < self.state.position:
                self.tally.late += 1
            else:
                self.add_decision(Recorded(incarnation, event, message.stored_ns))

    def judge(self) -> list[Shadowed]:
        """Judge the decisions known to be made at the present position."""
        self._check(self.state.position)
        found, self._found = self._found, []
        return found

    def advance(self, message: Record | Unreadable) -> list[Shadowed]:
        """Judge the decisions made at the present position, then fold the next message."""
        found = self.judge()
        if isinstance(message, Record):
            for event in message.batch.events:
                if isinstance(event, LoadReported):
                    self._compare_estimates(message, event)
        self.fold(message)
        return found

    def _view(self, recorded: Recorded) -> Loads | None:
        loads = super()._view(recorded)
        if loads is None and self._views.pop(recorded.incarnation, None) is not None:
            # One of its decisions is not in the log. If all before this one are, the plain fold is its view.
            loads = super()._view(recorded)
        self.tally.unjudged += loads is None
        return loads

    def _keep_view(self, recorded: Recorded, loads: Loads) -> None:
        """More decisions of the incarnation may follow: keep its view, as the most recently used one."""
        self._views.pop(recorded.incarnation, None)
        for former in [one for one in self._views if _succeeded(one, recorded.incarnation)]:
            del self._views[former]
        if len(self._views) >= VIEWS_MAX:
            del self._views[next(iter(self._views))]
        self._views[recorded.incarnation] = (loads, recorded.decision.number)

    def _compare(self, loads: Loads, recorded: Recorded) -> Difference | None:
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
            self._pending[decision.worker, decision.epoch, decision.request] = (recorded, worker.block_size)
            if len(self._pending) > PENDING_MAX:
                self._pending.popitem(last=False)
        return None

    def _shadow(self, loads: Loads, decision: Decision) -> Shadowed | None:
        """The policy's choice, with both choices scored; None if it or the judge has no answer."""
        own = self._decide_by(self._policy, loads, decision)
        judged = own if self._judge == self._policy else self._decide_by(self._judge, loads, decision)
        if own is None or judged is None:
            return None
        score = _score(judged, own.decision)
        chosen_score = _score(judged, decision)
        if score is None or chosen_score is None:
            return None
        least = float(of_drawn(judged).scores.min())
        return Shadowed(
            decision.request,
            self._policy,
            own.decision.worker,
            decision.worker,
            self._judge,
            score,
            chosen_score,
            least,
        )

    def _decide_by(self, policy: str, loads: Loads, decision: Decision) -> Evaluation | None:
        try:
            reply = self._reevaluate(self.state.index, loads, self.state.cold, with_policy(decision, policy))
        except CannotRecompute:
            return None
        return None if isinstance(reply, RouteRefused) else reply

    def _compare_estimates(self, record: Record, report: LoadReported) -> None:
        """Compare decisions' estimates with what a worker reports."""
        for request, cached in zip(report.prefilled, report.cached, strict=False):
            pending = self._pending.pop((record.batch.writer, record.batch.epoch, request), None)
            if pending is None:
                continue
            recorded, block_size = pending
            decision, chosen = recorded.decision, recorded.decision.chosen
            if cached >= 0:
                estimated = min(chosen.cached_blocks * block_size, decision.prompt_tokens - 1)
                self.tally.cached_tokens.add(estimated, cached)
            estimated_ms = chosen.queue_ms + chosen.prefill_ms
            if estimated_ms > 0:
                # Both times are the log server's: one clock.
                self.tally.first_token_s.add(
                    estimated_ms / 1000, max(0.0, (record.stored_ns - recorded.stored_ns) / 1e9)
                )


def of_drawn(judged: Evaluation) -> Candidates:
    """All candidates, or with draws those of the engine and of the revision that they used."""
    found, decision = judged.candidates, judged.decision
    if decision.draw is not None:
        found = found.of_engine(decision.draw.used)
    return found if decision.revision_draw is None else found.of_revision(decision.revision_draw.used)


def _score(judged: Evaluation, choice: Decision) -> float | None:
    """The judge's score of a choice; None if the judge has no such candidate."""
    same = [candidate for candidate in judged.candidates if candidate.worker == choice.worker]
    of_leg = [candidate.score for candidate in same if candidate.leg == choice.leg]
    return min(of_leg or [candidate.score for candidate in same], default=None)


def _succeeded(former: Incarnation, by: Incarnation) -> bool:
    return former[0] == by[0] and former[1] < by[1]
