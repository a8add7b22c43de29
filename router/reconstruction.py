"""All candidates of some decisions, which the log keeps a few of: fold the log again and score the workers where those were made. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from headwater.router.decision.decide import CannotRecompute, reevaluate
from headwater.router.fold.load import Loads
from headwater.router.fold.state import RouterState
from headwater.router.replay import Difference, Incarnation, Recorded, Replay
from headwater.schemas.events.route import Candidate, Decision, RouteRefused

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
