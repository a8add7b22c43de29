"""Replay of decisions: the log is folded again, and every decision recomputed at the position where it was made. Pure.

A router decides on the fold up to some position plus its own decisions that the log did not hold yet. So each
incarnation of a router gets loads of its own (its *view*): they apply its decisions at the position where
they were made, and skip them where the log stores them. The index is shared, because decisions never change it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headwater.events.chain import Break
from headwater.events.ports import Record, Unreadable
from headwater.router.decision.decide import RECOMPUTABLE, CannotRecompute, recompute, reevaluate
from headwater.router.fold.load import Loads
from headwater.router.fold.state import RouterState, apply_to_loads, is_on_loads
from headwater.schemas.events.route import Candidate, Decision, RouteRefused

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
        for recorded in sorted(self._made_at.pop(position, ()), key=lambda one: one.decision.number):
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
        self, state: RouterState, decisions: list[Recorded], wanted: Callable[[Decision], bool]
    ) -> None:
        super().__init__(state, decisions)
        self.found: dict[Key, Reconstructed] = {}
        self._wanted = wanted
        self.left = sum(wanted(one.decision) for one in decisions)
        """How many wanted decisions are made at later positions."""

    def _check(self, position: int) -> Difference | None:
        self.left -= sum(self._wanted(one.decision) for one in self._made_at.get(position, ()))
        return super()._check(position)

    def _compare(self, loads: Loads, recorded: Recorded) -> Difference | None:
        if self._wanted(recorded.decision):
            found = self._reconstruct(loads, recorded.decision)
            self.found[recorded.incarnation, recorded.decision.number] = found
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
