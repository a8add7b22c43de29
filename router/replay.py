"""Replay of decisions: the log is folded again, and every decision recomputed where it was made, by its own policy or another. Pure.

A router decides on the fold up to some position plus its own decisions that the log did not hold yet. So each
incarnation of a router gets loads of its own (its *view*): they apply its decisions at the position where
they were made, and skip them where the log stores them. The index is shared, because decisions never change it.

The shadow policy (`ShadowFold`) recomputes each decision of the log with another policy, on the same state.
A decision is stored some time after it was made, on a fold that had read less. So messages are read first and folded
later, when the decisions made before them are known; the caller of `read` and `advance` chooses the delay. On that fold
the deciding router's view is rebuilt as for a replay, the shadow policy decides, and the judge policy scores
both choices. Later load reports give the cached tokens and the time to the first token, which are compared with the
decision's estimates.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from headwater.events.chain import Break
from headwater.events.ports import Record, Unreadable
from headwater.router.candidates import Candidates
from headwater.router.decide import (
    RECOMPUTABLE,
    CannotRecompute,
    Evaluation,
    recompute,
    reevaluate,
    with_policy,
)
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.load import Loads
from headwater.router.state import RouterState, apply_to_loads, is_on_loads
from headwater.schemas.events import LoadReported
from headwater.schemas.routing import Candidate, Decision, RouteRefused, Shadowed

Incarnation = tuple[str, int]
"""A router's name and epoch."""


class Difference(NamedTuple):
    """A decision that was not reproduced. `recomputed` is what came out instead, or why nothing could."""

    incarnation: Incarnation
    recorded: Decision
    recomputed: Decision | RouteRefused | str


class Recorded(NamedTuple):
    """A decision of the log, stored at `stored_ns`."""

    incarnation: Incarnation
    decision: Decision
    stored_ns: int = 0


class Replay:
    """Folds message by message, and recomputes the decisions made at each position.

    `decisions` are all decisions of the log: each is made at an earlier position than the one that stores it. Those of an algorithm
    that this release lacks are counted by its version (`other_algorithms`) and applied without recomputing them.
    """

    def __init__(self, state: RouterState, decisions: list[Recorded]) -> None:
        self.state = state
        self.verified = 0
        self.unverifiable = 0
        self.other_algorithms: Counter[int] = Counter()
        self.breaks: list[Break] = []
        self._made_at: defaultdict[int, list[Recorded]] = defaultdict(list)
        self._last_number: dict[Incarnation, int] = {}
        self._views: dict[Incarnation, tuple[Loads, int]] = {}
        for recorded in decisions:
            self.add_decision(recorded)

    def add_decision(self, recorded: Recorded) -> None:
        """Add a decision made at the present position or a later one."""
        self._made_at[recorded.decision.position].append(recorded)
        number = recorded.decision.number
        self._last_number[recorded.incarnation] = max(number, self._last_number.get(recorded.incarnation, 0))

    def start(self) -> Difference | None:
        """Recompute the decisions made at the position where the replay begins."""
        return self._check(self.state.position)

    def step(self, message: Record | Unreadable) -> Difference | None:
        """Fold one message, then recompute the decisions made at its position. Returns the first difference."""
        self.fold(message)
        return self._check(message.position)

    def fold(self, message: Record | Unreadable) -> None:
        """Fold one message without recomputing decisions."""
        if isinstance(message, Unreadable):
            return self.state.skip(message)
        batch = message.batch
        events, broken = self.state.admit(message)
        if broken is not None:
            self.breaks.append(broken)
        for event in events:
            self.state.apply_to_index(batch, event)
            if not is_on_loads(event):
                continue
            apply_to_loads(self.state.loads, message, event)
            writer = (batch.writer, batch.epoch)
            for other, (loads, _) in self._views.items():
                if other != writer or not isinstance(event, Decision):
                    apply_to_loads(loads, message, event)
        return None

    def _check(self, position: int) -> Difference | None:
        for recorded in sorted(self._made_at.pop(position, ()), key=lambda entry: entry.decision.number):
            loads = self._view(recorded)
            if loads is None:
                self.unverifiable += 1
                continue
            if recorded.decision.algorithm in RECOMPUTABLE:
                difference = self._compare(loads, recorded)
                if difference is not None:
                    return difference
                self.verified += 1
            else:
                self.other_algorithms[recorded.decision.algorithm] += 1
            loads.decide(recorded.decision)
            self._keep_view(recorded, loads)
        return None

    def _view(self, recorded: Recorded) -> Loads | None:
        """The loads that its router decided on; None if an earlier decision of that incarnation is missing."""
        decision = recorded.decision
        loads, number = self._views.get(recorded.incarnation) or (None, decision.seen)
        if decision.number != number + 1:
            return None
        return _copy(self.state.loads) if loads is None else loads

    def _keep_view(self, recorded: Recorded, loads: Loads) -> None:
        """The view now includes the decision. After an incarnation's last decision it is dropped."""
        if recorded.decision.number == self._last_number[recorded.incarnation]:
            self._views.pop(recorded.incarnation, None)
        else:
            self._views[recorded.incarnation] = (loads, recorded.decision.number)

    def _compare(self, loads: Loads, recorded: Recorded) -> Difference | None:
        incarnation, decision, _ = recorded
        try:
            recomputed = recompute(self.state.index, loads, self.state.cold, decision)
        except CannotRecompute as error:
            return Difference(incarnation, decision, str(error))
        if isinstance(recomputed, Decision):
            # The time in the queue does not result from deciding.
            recomputed = msgspec.structs.replace(recomputed, waited_ms=decision.waited_ms)
        return None if recomputed == decision else Difference(incarnation, decision, recomputed)


def _copy(loads: Loads) -> Loads:
    return msgspec.convert(msgspec.to_builtins(loads), Loads)


# All candidates of some decisions, of which the log keeps a few.

Key = tuple[Incarnation, int]
"""A router's incarnation and the number of its decision."""


class Reconstructed(NamedTuple):
    """All candidates; or none, and why they could not be recomputed."""

    candidates: tuple[Candidate, ...]
    problem: str = ""


class Reconstruction(Replay):
    """A replay that scores the candidates of the decisions that are `wanted`, and only applies the others."""

    def __init__(
        self, state: RouterState, decisions: list[Recorded], selects: Callable[[Decision], bool]
    ) -> None:
        super().__init__(state, decisions)
        self.found: dict[Key, Reconstructed] = {}
        self._wanted = selects
        self.left = sum(selects(recorded.decision) for recorded in decisions)
        """How many wanted decisions are made at later positions."""

    def _check(self, position: int) -> Difference | None:
        self.left -= sum(self._wanted(recorded.decision) for recorded in self._made_at.get(position, ()))
        return super()._check(position)

    def _compare(self, loads: Loads, recorded: Recorded) -> Difference | None:
        if self._wanted(recorded.decision):
            reconstructed = self._reconstruct(loads, recorded.decision)
            self.found[recorded.incarnation, recorded.decision.number] = reconstructed
        return None

    def _reconstruct(self, loads: Loads, decision: Decision) -> Reconstructed:
        try:
            again = reevaluate(self.state.index, loads, self.state.cold, decision)
        except CannotRecompute as error:
            return Reconstructed((), str(error))
        if isinstance(again, RouteRefused):
            return Reconstructed((), f"it is refused now: {again.reason}")
        if again.decision.digest != decision.digest:
            return Reconstructed((), "the costs differ from those that its digest is of: see replay --verify")
        return Reconstructed(tuple(again.candidates))


# The shadow policy.

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
        judged, self._found = self._found, []
        return judged

    def advance(self, message: Record | Unreadable) -> list[Shadowed]:
        """Judge the decisions made at the present position, then fold the next message."""
        judged = self.judge()
        if isinstance(message, Record):
            for event in message.batch.events:
                if isinstance(event, LoadReported):
                    self._compare_estimates(message, event)
        self.fold(message)
        return judged

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
        for former in [
            incarnation for incarnation in self._views if _succeeded(incarnation, recorded.incarnation)
        ]:
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
        policy_choice = self._decide_by(self._policy, loads, decision)
        judged = (
            policy_choice if self._judge == self._policy else self._decide_by(self._judge, loads, decision)
        )
        if policy_choice is None or judged is None:
            return None
        score = _score(judged, policy_choice.decision)
        chosen_score = _score(judged, decision)
        if score is None or chosen_score is None:
            return None
        least = float(of_drawn(judged).scores.min())
        return Shadowed(
            decision.request,
            self._policy,
            policy_choice.decision.worker,
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
    candidates, decision = judged.candidates, judged.decision
    if decision.draw is not None:
        candidates = candidates.having("engine", decision.draw.used)
    if decision.revision_draw is not None:
        candidates = candidates.having("revision", decision.revision_draw.used)
    return candidates


def _score(judged: Evaluation, choice: Decision) -> float | None:
    """The judge's score of a choice; None if the judge has no such candidate."""
    same = [candidate for candidate in judged.candidates if candidate.worker == choice.worker]
    of_leg = [candidate.score for candidate in same if candidate.leg == choice.leg]
    return min(of_leg or [candidate.score for candidate in same], default=None)


def _succeeded(former: Incarnation, by: Incarnation) -> bool:
    return former[0] == by[0] and former[1] < by[1]
