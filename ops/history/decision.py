"""A routing decision for people: every candidate with its cost in terms, the margin, and what another policy or weight would have chosen.

What is shown comes from the decision's own record. Candidates that the record does not keep, and another choice, are computed
on the state that its router had, which is folded again up to where the decision was made.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from headwater.events.ports import LogError
from headwater.ops.history.explanation import afterwards, cost_terms, explain_draws, why
from headwater.ops.history.history import History, NotKept
from headwater.ops.history.requests import StoredDecision, decisions_in, request_of
from headwater.router.cost import cost_weights, weights_at
from headwater.router.decide import RECOMPUTABLE, CannotRecompute, reevaluate
from headwater.router.load import Loads
from headwater.router.policies import PolicyError
from headwater.router.state import RouterState
from headwater.schemas.events import LoadReported
from headwater.schemas.routing import Candidate, Decision, PolicyName, RouteRefused, Weights

LATER_S: Final = 600
"""Events up to this long after a decision are searched for what became of it."""

STORED_WITHIN: Final = 2_000
"""How many messages after a decision the log may store an earlier one of its router."""


class Term(NamedTuple):
    """A part of a candidate's cost."""

    name: str
    value: float


class WhatIf(NamedTuple):
    """A decision made again with other preferences or weights; or `problem`, why it could not be."""

    decision: Decision | None
    candidates: Sequence[Candidate] = ()
    problem: str = ""


async def find(history: History, decision: str) -> StoredDecision | None:
    """A decision by its name, among those of a request that the history has."""
    row = history.requests.by_id.get(request_of(decision))
    for position in row.decisions if row is not None else ():
        record = await history.record_at(position)
        for found in decisions_in(record) if record is not None else ():
            if found.decision.request == decision:
                return found
    return None


def is_timed(decision: Decision) -> bool:
    """Are its costs in milliseconds? Until the times of prefills are known they are in blocks."""
    return any(candidate.prefill_ms for candidate in decision.candidates)


def terms_of(candidate: Candidate, decision: Decision, block_size: int) -> list[Term]:
    """A candidate's cost in terms, which sum to its score."""
    if candidate.prefill_ms or candidate.transfer_ms or is_timed(decision):
        queue, prefill, transfer, others, _ = cost_terms(candidate, decision)
        terms = [
            Term("queue", queue),
            Term("prefill", prefill),
            Term("transfer", transfer),
            Term("delay of others", others),
        ]
        rest = "memory and rest"
    else:
        weights = weights_at(cost_weights(decision.weights), decision.spare)
        size = max(1, block_size)
        cached = candidate.cached_blocks + candidate.lower_blocks
        held = candidate.decode_blocks + max(0, -(-decision.prompt_tokens // size) - candidate.cached_blocks)
        terms = [
            Term("queue", weights.prefill * candidate.prefill_tokens / size),
            Term("prefill", weights.prefill * (decision.prompt_tokens - cached * size) / size),
            Term("lower tier", weights.prefill * weights.lower_tier * candidate.lower_blocks),
            Term("held blocks", weights.decode * held),
        ]
        if candidate.leg == "decode":
            terms = [Term("held blocks", weights.decode * held)]
        rest = "rest"
    terms = [term for term in terms if term.value]
    remainder = candidate.score - sum(term.value for term in terms)
    return [*terms, Term(rest, remainder)] if abs(remainder) > 1e-6 else terms


def margin_of(decision: Decision, candidates: Sequence[Candidate]) -> float | None:
    """How much more the best other candidate would have cost than the chosen one; None without another."""
    others = [candidate.score for candidate in candidates if candidate.worker != decision.worker]
    return min(others) - decision.chosen.score if others else None


def explanation(decision: Decision, engines: Mapping[str, str]) -> str:
    """In a few words what was drawn by weights, and why the chosen worker was chosen."""
    return "; ".join([*explain_draws(decision), why(decision, engines, timed=is_timed(decision))])


async def later(history: History, recorded: StoredDecision, position: int) -> list[str]:
    """What the log knew of a decision afterwards, up to `LATER_S` and a position."""
    until = min(position, await history.log.position_at(recorded.stored_ns + LATER_S * 1_000_000_000))
    lines: list[str] = []
    subjects = [subject for subject in history.subjects if ".kv." not in subject]
    async for piece in history.log.scan(recorded.position, until, subjects):
        for _, event in piece.events():
            lines += afterwards(recorded.decision, event)
            if isinstance(event, LoadReported) and recorded.decision.request in event.finished:
                return lines
    return lines


async def state_of(history: History, recorded: StoredDecision) -> tuple[RouterState, Loads]:
    """The state on which a decision was made. Raises `NotKept` and `LogError`.

    Its router knew the log up to the decision's position, and those of its own decisions that the log stored later. In which order it
    learnt of these and of what workers reported makes no difference to the loads.
    """
    decision = recorded.decision
    earlier_decisions = await _stored_later(history, recorded)
    if len(earlier_decisions) < decision.number - decision.seen - 1:
        raise NotKept("earlier decisions of its router, which were not stored yet, are not in this log")
    state = await history.state_at(decision.position)
    loads = msgspec.convert(msgspec.to_builtins(state.loads), Loads)
    for earlier in earlier_decisions:
        loads.decide(earlier)
    return state, loads


async def _stored_later(history: History, recorded: StoredDecision) -> list[Decision]:
    """The router's own decisions before this one that the log did not hold yet, in order."""
    decision = recorded.decision
    if decision.seen == decision.number - 1:
        return []
    routes = [subject for subject in history.subjects if ".route." in subject]
    return [
        earlier.decision
        async for piece in history.log.scan(decision.position, recorded.position + STORED_WITHIN, routes)
        for record in piece.records
        for earlier in decisions_in(record)
        if earlier.router == recorded.router and decision.seen < earlier.decision.number < decision.number
    ]


async def candidates_of(history: History, recorded: StoredDecision) -> WhatIf:
    """All candidates of a decision, also those that its record does not keep."""
    policy = cast(PolicyName, recorded.decision.preferences.policy)
    return await what_if(history, recorded, policy, {})


async def what_if(
    history: History, recorded: StoredDecision, policy: PolicyName, weights: Mapping[str, float]
) -> WhatIf:
    """The decision made again on the same state with another policy, or other weights by name."""
    decision = recorded.decision
    if decision.algorithm not in RECOMPUTABLE:
        versions = " and ".join(map(str, sorted(RECOMPUTABLE)))
        return WhatIf(
            None,
            problem=f"version {decision.algorithm} of the algorithm made it, and this release has {versions}; its record is shown as it is",
        )
    changed = msgspec.structs.replace(
        decision,
        preferences=msgspec.structs.replace(decision.preferences, policy=policy),
        policy_draw=decision.policy_draw if policy == decision.preferences.policy else None,
        weights=msgspec.structs.replace(decision.weights, **weights),
    )
    try:
        state, loads = await state_of(history, recorded)
        again = reevaluate(state.index, loads, state.cold, changed)
    except (CannotRecompute, PolicyError, NotKept, LogError) as error:
        return WhatIf(None, problem=str(error))
    if isinstance(again, RouteRefused):
        return WhatIf(None, problem=f"it would be refused: {again.reason}")
    return WhatIf(again.decision, list(again.candidates))


def weights_with(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Weights from texts by name. Raises ValueError for an unknown name or a text that is no number of its kind."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(Weights)}
    weights: dict[str, Any] = {}
    for name, text in overrides.items():
        if name not in defaults:
            raise ValueError(f"there is no weight {name!r}: weights are {', '.join(defaults)}")
        default = defaults[name]
        try:
            if isinstance(default, bool):
                weights[name] = {"true": True, "false": False}[text.lower()]
            else:
                weights[name] = type(default)(float(text))
        except (KeyError, ValueError, OverflowError):
            raise ValueError(
                f"weight {name}: {text!r} is not {'true or false' if isinstance(default, bool) else 'a number'}"
            ) from None
        if not isinstance(default, bool) and not 0 <= weights[name] < 1e12:
            raise ValueError(f"weight {name}: {text} is not between 0 and 1e12")
    return weights
