"""Replaying decisions: fold the log again and make every decision again where it was made. Pure.

A router decides on the fold up to some position plus its own decisions that the log does not hold yet. So for
each life of a router a second load state runs beside the plain fold: it takes that life's decisions at the
position where they were made, and skips them where the log has them. The index is shared: decisions never
change it.
"""

from collections import defaultdict
from typing import NamedTuple

import msgspec

from headwater.events.chain import Break
from headwater.events.log import Record, Unreadable
from headwater.router.decide import CannotRecompute, recompute
from headwater.router.load import Loads
from headwater.router.state import RouterState, apply_to_loads
from headwater.schemas.route import Decision, RouteRefused

Life = tuple[str, int]
"""A router and its epoch."""


class Difference(NamedTuple):
    """A decision that came out otherwise. `again` is what was decided now, or why nothing could be."""

    life: Life
    recorded: Decision
    again: Decision | RouteRefused | str


class Recorded(NamedTuple):
    """A decision as the log holds it, since `stored_ns`."""

    life: Life
    decision: Decision
    stored_ns: int = 0


class Replay:
    """Folds record by record; `check` is given every decision made at the position just reached.

    `decisions` are all decisions of the log (they are needed before their own position is reached, since a
    decision is made earlier than it is stored).
    """

    def __init__(self, state: RouterState, decisions: list[Recorded]) -> None:
        self.state = state
        self.verified = 0
        self.unverifiable = 0
        self.breaks: list[Break] = []
        self._made_at: defaultdict[int, list[Recorded]] = defaultdict(list)
        self._last_number: dict[Life, int] = {}
        self._views: dict[Life, tuple[Loads, int]] = {}
        for recorded in decisions:
            self.expect(recorded)

    def expect(self, recorded: Recorded) -> None:
        """One more decision, made at a position that is not passed yet."""
        self._made_at[recorded.decision.position].append(recorded)
        number = recorded.decision.number
        self._last_number[recorded.life] = max(number, self._last_number.get(recorded.life, 0))

    def start(self) -> Difference | None:
        """Check the decisions made at the position where the replay begins."""
        return self._check(self.state.position)

    def step(self, message: Record | Unreadable) -> Difference | None:
        """Fold one message, then check the decisions made on it. Returns the first difference."""
        self.fold(message)
        return self._check(message.position)

    def fold(self, message: Record | Unreadable) -> None:
        """Fold one message, and check nothing."""
        if isinstance(message, Unreadable):
            return self.state.skip(message)
        batch = message.batch
        events, broken = self.state.admit(message)
        if broken is not None:
            self.breaks.append(broken)
        for event in events:
            self.state.apply_to_index(batch, event)
            apply_to_loads(self.state.loads, message, event)
            life = (batch.writer, batch.epoch)
            for other, (loads, _) in self._views.items():
                if other != life or not isinstance(event, Decision):
                    apply_to_loads(loads, message, event)
        return None

    def _check(self, position: int) -> Difference | None:
        for recorded in sorted(self._made_at.pop(position, ()), key=lambda one: one.decision.number):
            loads = self._view(recorded)
            if loads is None:
                self.unverifiable += 1
                continue
            difference = self._again(loads, recorded)
            if difference is not None:
                return difference
            loads.decide(recorded.decision)
            self.verified += 1
            self._made(recorded, loads)
        return None

    def _view(self, recorded: Recorded) -> Loads | None:
        """The loads that its router saw, None where decisions of that life before it are missing."""
        decision = recorded.decision
        loads, number = self._views.get(recorded.life) or (None, decision.seen)
        if decision.number != number + 1:
            return None
        return _copy(self.state.loads) if loads is None else loads

    def _made(self, recorded: Recorded, loads: Loads) -> None:
        """A decision is part of its life's view now; behind the last one the plain fold is as good."""
        if recorded.decision.number == self._last_number[recorded.life]:
            self._views.pop(recorded.life, None)
        else:
            self._views[recorded.life] = (loads, recorded.decision.number)

    def _again(self, loads: Loads, recorded: Recorded) -> Difference | None:
        life, decision, _ = recorded
        try:
            again = recompute(self.state.index, loads, self.state.cold, decision)
        except CannotRecompute as error:
            return Difference(life, decision, str(error))
        if isinstance(again, Decision):
            # How long the query had waited is no part of deciding.
            again = msgspec.structs.replace(again, waited_ms=decision.waited_ms)
        return None if again == decision else Difference(life, decision, again)


def _copy(loads: Loads) -> Loads:
    return msgspec.convert(msgspec.to_builtins(loads), Loads)
