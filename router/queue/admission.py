"""Can a query be admitted now? Saturated workers are left out as long as any other worker can take it.

Saturated workers are added to the decision's `exclude`, so that the decision can be recomputed from its record.
"""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import msgspec

from headwater.router.decision.filters import allows
from headwater.router.fold.load import Loads
from headwater.router.fold.worker import Traits
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused

Choose = Callable[[RouteQuery], Decision | RouteRefused]
"""Decides a query on the present state and changes nothing."""


class Saturated(NamedTuple):
    """Every worker that could take the query is saturated. `fallback` is the decision with saturation ignored.

    `workers` are the saturated incarnations that could take it, or more.
    """

    fallback: Decision
    workers: frozenset[str] = frozenset()


Verdict = Decision | RouteRefused | Saturated


def find_placement(choose: Choose, loads: Loads, query: RouteQuery, saturated: Sequence[str]) -> Verdict:
    """Decide among the workers that are not `saturated` (as `exclude` lists them), if there are any."""
    narrowed: Decision | RouteRefused | None = None
    if saturated and not LoadSnapshot.of(loads).all_in(set(saturated)):
        wanted = query.constraints
        rest = msgspec.structs.replace(wanted, exclude=(*wanted.exclude, *saturated))
        narrowed = choose(msgspec.structs.replace(query, constraints=rest))
        if isinstance(narrowed, Decision) and not _decodes_on_prefill_worker(loads, narrowed):
            return narrowed
    unrestricted = choose(query)
    if isinstance(unrestricted, RouteRefused) or not saturated:
        return unrestricted
    if isinstance(narrowed, Decision) and _decodes_on_prefill_worker(loads, unrestricted):
        # Then there is no decode worker at all.
        return narrowed
    return Saturated(unrestricted, _passing(loads, query.constraints, saturated))


def _passing(loads: Loads, wanted: Constraints, incarnations: Sequence[str]) -> frozenset[str]:
    """Those of the incarnations that pass the filters."""
    if wanted.pinned:
        return frozenset(one for one in incarnations if one.rpartition(".")[0] == wanted.pinned)
    passing: dict[Traits, bool] = {}
    found: list[str] = []
    for incarnation in incarnations:
        worker = loads.workers.get(incarnation.rpartition(".")[0])
        if worker is None:
            continue
        traits = worker.traits
        if traits not in passing:
            passing[traits] = allows(traits, wanted)
        if passing[traits]:
            found.append(incarnation)
    return frozenset(found)


class LoadSnapshot(NamedTuple):
    """The workers that take requests, and a fingerprint of what filters see of them."""

    ready: frozenset[str]
    fingerprint: int

    @classmethod
    def of(cls, loads: Loads) -> "LoadSnapshot":
        """Of the fold's present loads."""
        ready = [one for one in loads.workers.values() if one.takes_requests]
        seen = tuple((one.name, one.epoch, one.role, one.loras, one.taints) for one in ready)
        fingerprint = hash((seen, tuple(loads.engine_weights.items())))
        return cls(frozenset(f"{one.name}.{one.epoch}" for one in ready), fingerprint)

    def all_in(self, saturated: Set[str]) -> bool:
        """Are there workers that take requests, and are all of them saturated? Then nothing needs to be decided."""
        return bool(self.ready) and self.ready <= saturated


class BlockedKey(NamedTuple):
    """Why queries of one placement key were not placed: with this fingerprint, all that could take them were among these saturated `workers`."""

    fingerprint: int
    workers: frozenset[str]

    @classmethod
    def of(cls, snapshot: LoadSnapshot, verdict: Saturated) -> "BlockedKey":
        """From a verdict on that snapshot."""
        return cls(snapshot.fingerprint, verdict.workers)

    def still_blocks(self, snapshot: LoadSnapshot, saturated: Set[str]) -> bool:
        """Is the key known to be blocked still, without deciding again?"""
        return snapshot.fingerprint == self.fingerprint and self.workers <= saturated


def uncached_tokens(decision: Decision, loads: Loads) -> int:
    """Prompt tokens to compute at the candidate that caches most of the prompt."""
    cached = max(
        (one.cached_blocks + one.lower_blocks) * loads.workers[one.worker].block_size
        for one in decision.candidates
    )
    return max(0, decision.prompt_tokens - cached)


def first_token_s(decision: Decision, *, queued: bool) -> float:
    """The lowest estimate of the time to the first token, with or without what workers have `queued`; 0: unknown."""
    least_ms = min(
        one.prefill_ms + one.transfer_ms + (one.queue_ms if queued else 0.0) for one in decision.candidates
    )
    return least_ms / 1_000.0


def _decodes_on_prefill_worker(loads: Loads, decision: Decision) -> bool:
    """Would a prefill worker also decode, perhaps only because the decode workers were left out?"""
    return not decision.leg and loads.workers[decision.worker].role == "prefill"
