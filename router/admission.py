"""Whether a query may have a worker now, or should wait: busy workers are left out while any other can take it.

What is left out goes into the decision's `exclude`, so that it can be made again from its record.
"""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import msgspec

from headwater.router.load import Loads
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

Choose = Callable[[RouteQuery], Decision | RouteRefused]
"""Decides a query on the present state and changes nothing."""


class AllBusy(NamedTuple):
    """Everybody who could take the query is busy. `anyway` is what would be decided nevertheless."""

    anyway: Decision


def admit(
    choose: Choose, loads: Loads, query: RouteQuery, busy: Sequence[str]
) -> Decision | RouteRefused | AllBusy:
    """Decide among those that are not in `busy` (lives, as `exclude` names them), if there are any."""
    narrowed: Decision | RouteRefused | None = None
    if busy and not Fleet.of(loads).all_busy(set(busy)):
        narrowed = choose(msgspec.structs.replace(query, exclude=(*query.exclude, *busy)))
        if isinstance(narrowed, Decision) and not _makeshift(loads, narrowed):
            return narrowed
    whole = choose(query)
    if isinstance(whole, RouteRefused) or not busy:
        return whole
    if isinstance(narrowed, Decision) and all(
        not candidate.leg and loads.workers[candidate.worker].role == "prefill"
        for candidate in whole.candidates
    ):
        return narrowed
    return AllBusy(whole)


class Fleet(NamedTuple):
    """Who takes requests, and how each stands: while this stays the same, so does who may take a query."""

    takers: frozenset[str]
    standing: int

    @classmethod
    def of(cls, loads: Loads) -> "Fleet":
        """As the fold has it now."""
        takers = [one for one in loads.workers.values() if one.takes_requests]
        standing = hash(tuple((one.name, one.epoch, one.role, one.loras, one.taints) for one in takers))
        return cls(frozenset(f"{one.name}.{one.epoch}" for one in takers), standing)

    def all_busy(self, busy: Set[str]) -> bool:
        """Does anybody take requests, and is everybody who does in `busy`? Saves deciding: nobody could be chosen."""
        return bool(self.takers) and self.takers <= busy


class Stuck(NamedTuple):
    """Why a query could not be placed: of this fleet these lives could take it, and were busy."""

    standing: int
    lives: frozenset[str]

    @classmethod
    def of(cls, fleet: Fleet, verdict: AllBusy) -> "Stuck":
        """The reason."""
        lives = frozenset(f"{one.worker}.{one.epoch}" for one in verdict.anyway.candidates)
        return cls(fleet.standing, lives)

    def holds(self, fleet: Fleet, busy: Set[str]) -> bool:
        """Can it still not be placed, without deciding again? Where only what comes behind it is busy: not known."""
        return fleet.standing == self.standing and self.lives <= busy


def uncached_tokens(decision: Decision, loads: Loads) -> int:
    """Tokens of the prompt to compute at the candidate that has most of it."""
    had = max(
        (one.cached_blocks + one.lower_blocks) * loads.workers[one.worker].block_size
        for one in decision.candidates
    )
    return max(0, decision.prompt_tokens - had)


def first_token_s(decision: Decision, *, queued: bool) -> float:
    """The least estimate of the time to the first token, with or without what the worker has `queued`; 0: unknown."""
    least_ms = min(
        one.prefill_ms + one.transfer_ms + (one.queue_ms if queued else 0.0) for one in decision.candidates
    )
    return least_ms / 1_000.0


def _makeshift(loads: Loads, decision: Decision) -> bool:
    """Would a prefill worker decode as well, perhaps only because those that decode were left out?"""
    return not decision.leg and loads.workers[decision.worker].role == "prefill"
