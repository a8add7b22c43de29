"""Why a decision did not choose a worker: what kept it from being a candidate, or what it would have cost more. Pure."""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from headwater.router.decision.candidates import FILTERS, revision_shares_for, weights_for
from headwater.router.decision.cost import cost_weights, delay_of_others, weights_at
from headwater.router.decision.decide import CannotRecompute, constraints_of
from headwater.router.fold.load import Loads
from headwater.router.fold.state import RouterState
from headwater.router.fold.worker import Traits
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Candidate, Decision

NEGLIGIBLE: Final = 0.005
"""Differences of cost below this are not told."""


class Obstacle(msgspec.Struct, frozen=True):
    """Something that keeps a worker from being chosen, whatever it would cost. `name` is a filter's, or one of ours."""

    name: str
    text: str


class Standing(NamedTuple):
    """A worker as a decision found it. `present`: it was in the pool; `cold`: its cached blocks did not count."""

    present: bool
    epoch: int = 0
    engine: str = ""
    cold: bool = False
    obstacles: tuple[Obstacle, ...] = ()
    revision: str = ""


def standing_of(state: RouterState, loads: Loads, worker: str, decision: Decision) -> Standing:
    """The worker on the state that the decision was made on. `loads` are those of its router."""
    known = loads.workers.get(worker)
    if known is None:
        return Standing(False)
    try:
        wanted = constraints_of(loads, decision)
    except CannotRecompute:
        wanted = decision.constraints
    obstacles: list[Obstacle] = []
    if wanted.pinned and wanted.pinned != worker:
        obstacles.append(Obstacle("pinned", f"the request was for worker {wanted.pinned} only"))
    for one in FILTERS:
        if one.applies(wanted) and not one.keeps(known.traits, wanted):
            obstacles.append(Obstacle(one.name, TEXTS[one.name](known.traits, wanted)))
    if f"{worker}.{known.epoch}" in wanted.exclude:
        obstacles.append(Obstacle("excluded", "the query left it out by name"))
    weights = weights_for(loads, wanted)
    if weights and weights.get(known.engine, 0.0) <= 0:
        shares = " ".join(f"{engine}={weight:g}" for engine, weight in sorted(weights.items()))
        text = f"the engine weights ({shares}) give its engine {known.engine} no new request"
        obstacles.append(Obstacle("engine weights", text))
    split = revision_shares_for(loads, wanted)
    if split.get(known.revision, 1.0) <= 0:
        shares = " ".join(f"{revision}={share:g}" for revision, share in sorted(split.items()))
        text = f"the traffic split ({shares}) gives its revision {known.revision} no new request"
        obstacles.append(Obstacle("traffic split", text))
    return Standing(True, known.epoch, known.engine, worker in state.cold, tuple(obstacles), known.revision)


def _state_text(worker: Traits, _: Constraints) -> str:
    return f"it was {'draining' if worker.draining and worker.state == 'ready' else worker.state}"


def _role_text(worker: Traits, wanted: Constraints) -> str:
    if worker.role == "prefill":
        return "it only prefills, and this was a decode leg"
    return f"it cannot take over KV of the kind {wanted.pairs_with}: its own is {worker.pairs_with or 'none'}"


TEXTS: Final[dict[str, Callable[[Traits, Constraints], str]]] = {
    "capability": lambda worker, wanted: (
        f"its engine lacks {', '.join(one for one in wanted.needs if one not in worker.capabilities)}"
    ),
    "encode": lambda worker, wanted: "it only encodes media",
    "embeddings": lambda worker, wanted: (
        f"its embeddings are of the format {worker.pairs_with}, and {wanted.pairs_with} was needed"
    ),
    "lora": lambda worker, wanted: f"it does not hold adapter {wanted.lora_name} and loads none on demand",
    "tier": lambda worker, wanted: (
        f"it is of tier {worker.tier or '(none)'}, and the request was for tier {wanted.tier}"
    ),
    "engine": lambda worker, wanted: (
        f"it runs {worker.engine}, and the request was for engine {wanted.engine}"
    ),
    "revision": lambda worker, wanted: (
        f"it is of revision {worker.revision or '(none)'}, and the request was for revision {wanted.revision}"
    ),
    "taint": lambda worker, wanted: (
        f"the request did not tolerate {', '.join(sorted(set(worker.taints) - set(wanted.tolerates)))}"
    ),
    "tokenizer": lambda worker, wanted: "it has another tokenizer than the answer so far was generated with",
    "media processor": lambda worker, wanted: (
        "it processes media with other settings than the model card has"
    ),
    "role": _role_text,
    "state": _state_text,
}
"""What each filter means for one worker."""


class Term(msgspec.Struct, frozen=True):
    """A part of the cost, of the worker and of the chosen one."""

    name: str
    worker: float
    chosen: float

    @property
    def more(self) -> float:
        """By how much the worker's is higher."""
        return self.worker - self.chosen


class Comparison(msgspec.Struct, frozen=True):
    """Two candidates of a decision. `unit` is that of costs; `terms` add up to both costs, and are empty where no times were known."""

    worker: Candidate
    chosen: Candidate
    unit: str
    terms: tuple[Term, ...]

    @property
    def lost_by(self) -> float:
        """By how much the worker's cost is higher; negative where it is lower."""
        return self.worker.score - self.chosen.score

    @property
    def decisive(self) -> tuple[str, ...]:
        """Terms of which each alone made the difference: as low as the chosen one's, it would have cost less."""
        return tuple(term.name for term in self.terms if 0 < self.lost_by < term.more)


def compare(decision: Decision, worker: Candidate) -> Comparison:
    """A candidate and the chosen one."""
    timed = any(candidate.prefill_ms for candidate in (worker, decision.chosen))
    terms: tuple[Term, ...] = ()
    if timed:
        own, chosen = _terms(decision, worker), _terms(decision, decision.chosen)
        terms = tuple(Term(name, own[name], chosen[name]) for name in own)
    return Comparison(worker, decision.chosen, "ms" if timed else "blocks", terms)


def _terms(decision: Decision, candidate: Candidate) -> dict[str, float]:
    """The cost of a candidate in parts."""
    weights = weights_at(cost_weights(decision.weights), decision.spare)
    found = {
        "queue": weights.prefill * candidate.queue_ms,
        "prefill": weights.prefill * candidate.prefill_ms,
        "transfer": candidate.transfer_ms,
        "others": delay_of_others(
            weights.crowding, weights.arrivals, candidate.requests, candidate.queue_ms, candidate.prefill_ms
        ),
    }
    return {**found, "rest": candidate.score - sum(found.values())}


def passed_over(decision: Decision, standing: Standing, worker: Candidate) -> str:
    """Why a candidate was not among those that were compared by cost, or not chosen though it cost no more; "" where cost decided."""
    draw, policy = decision.draw, decision.preferences.policy
    lower = worker.score <= decision.chosen.score
    if draw is not None and standing.engine != draw.used:
        weights = " ".join(f"{engine}={weight:g}" for engine, weight in draw.weights)
        return (
            f"the engine weights ({weights}) drew {draw.used} for this request, and it runs {standing.engine}"
        )
    split = decision.revision_draw
    if split is not None and standing.revision != split.used:
        shares = " ".join(f"{revision}={share:g}" for revision, share in split.weights)
        return f"the traffic split ({shares}) drew revision {split.used} for this request, and it is of {standing.revision or 'none'}"
    if policy not in ("", "kv"):
        return f"policy {policy} chose, which does not go by the cost alone"
    if decision.preferences.temperature > 0:
        return f"the choice was drawn at temperature {decision.preferences.temperature:g}, where a higher cost is less likely"
    if not lower:
        return ""
    if worker.leg != decision.chosen.leg:
        if decision.weights.apart and worker.leg == "":
            return "long prompts are prefilled apart (--weight apart), and it would have done all of it"
        return f"so little of the prompt was left to compute (at most {decision.weights.local_tokens} tokens) that it was not handed over"
    return "it cost the same: the request's seed drew among them"


def sentences(comparison: Comparison, decision: Decision) -> list[str]:
    """What a candidate would have cost, by how much more, and of which parts that is."""
    worker, chosen, unit = comparison.worker, comparison.chosen, comparison.unit
    by = comparison.lost_by
    more = (
        f"{by:.2f} {unit} more than" if by > 0 else f"{-by:.2f} {unit} less than" if by < 0 else "as much as"
    )
    lines = [
        f"it would have cost {worker.score:.2f} {unit}, {more} {chosen.worker} ({chosen.score:.2f} {unit})"
    ]
    parts = [
        f"{term.name} {term.worker:.2f} against {term.chosen:.2f} ({term.more:+.2f})"
        for term in comparison.terms
        if abs(term.more) > NEGLIGIBLE
    ]
    if parts:
        lines.append(f"in {unit}: {', '.join(parts)}")
    lines.append(
        f"it had {worker.cached_blocks} of the prompt's {decision.blocks} blocks cached, {chosen.worker} {chosen.cached_blocks}; "
        f"{worker.prefill_tokens} tokens queued against {chosen.prefill_tokens}; "
        f"{worker.requests} requests against {chosen.requests}; {worker.decode_blocks} blocks held against {chosen.decode_blocks}"
    )
    if comparison.decisive:
        names = " or ".join(comparison.decisive)
        lines.append(f"it would have cost less had its {names} been that of {chosen.worker}")
    return lines
