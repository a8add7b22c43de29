"""A decision and the events of a request as text for people: the candidates as a table, why one was chosen, and what became of it."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headwater.ops.terminal import table, utc_time
from headwater.router.candidates import drawing_key
from headwater.router.cost import cost_weights, delay_of_others, weights_at
from headwater.router.encode_leg import ANY_AHEAD
from headwater.schemas.events import (
    EncodeOutcome,
    Event,
    LoadReported,
    MediaPlace,
    RequestAccepted,
    RequestEncoded,
)
from headwater.schemas.inference import Leg
from headwater.schemas.media import ONE
from headwater.schemas.routing import Candidate, Decision, Draw, Shadowed
from headwater.schemas.tables import ENCODE_NEEDS

HIDDEN = frozenset({"request", "payload", "body", "answers", "tokens", "tenant", "answered"})
"""Fields of events that are not for a line of text."""

TIMES = frozenset({"began_ns", "after_ms"})
"""Fields that are for documents, not for a line of text."""

IF_ANY = frozenset({"priority", "sampled", "prepare_ms", "media_ms", "lease_ms"})
"""Fields that a line of text has only if they are not 0."""

ENCODED: dict[EncodeOutcome, str] = {
    "computed": "computed by {worker}",
    "cached": "{worker} had its embedding",
    "local": "left to the serving worker by {worker}",
    "failed": "left to the serving worker, as no encode worker delivered",
}

LEGS: dict[Leg, str] = {"": "all of it", "prefill": "prefill", "decode": "decode"}


def afterwards(decision: Decision, event: object) -> list[str]:
    """Return what an event adds to an earlier decision."""
    if isinstance(event, LoadReported) and decision.request in event.prefilled:
        place = event.prefilled.index(decision.request)
        cached = event.cached[place] if place < len(event.cached) else -1
        return [f"the engine found {cached} prompt tokens cached"] if cached >= 0 else []
    if isinstance(event, Shadowed) and event.request == decision.request:
        same = "the same" if event.worker == event.chosen else event.worker
        lost = event.chosen_score - event.least
        return [
            f"policy {event.policy} would have taken {same}; by {event.judge} the choice cost {lost:.2f} too much"
        ]
    return []


def describe(
    decision: Decision,
    position: int,
    after: Sequence[str] = (),
    engines: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A decision for people: what each worker had, what it would have cost, and which was taken."""
    candidates = sorted(decision.candidates, key=lambda candidate: candidate.score)
    timed = any(one.prefill_ms for one in candidates)
    decoded = timed and any(one.itl_ms for one in candidates)
    columns = _columns(decision, engines, timed=timed, decoded=decoded)
    rows = [[cell(candidate) for _, cell in columns] for candidate in candidates]
    does = f" ({LEGS[decision.leg]})" if any(one.leg for one in candidates) else ""
    spread = f" (standard deviation {decision.output_deviation})" if decision.output_deviation else ""
    expected = f"E2E: of {decision.output_tokens} output tokens{spread}, at most {decision.max_tokens}"
    lines = [
        _head(decision, position),
        table([title for title, _ in columns], rows),
        *_rest(decision),
        *([expected] if decoded else []),
        *explain_draws(decision),
        f"{decision.worker}{does}: {why(decision, engines, timed=timed)}",
    ]
    return "\n".join(lines + [f"  later: {line}" for line in after])


Cell = Callable[[Candidate], object]


def _columns(
    decision: Decision, engines: Mapping[str, str], *, timed: bool, decoded: bool
) -> list[tuple[str, Cell]]:
    """The columns of the table of candidates: those that all have, and those of what differs or is known."""
    candidates, adapter = decision.candidates, decision.constraints.lora_name
    legs = any(one.leg for one in candidates)
    every: list[tuple[str, bool, Cell]] = [
        ("", True, lambda one: "->" if one.worker == decision.worker else ""),
        ("worker", True, lambda one: one.worker),
        (
            "engine",
            len({engines.get(one.worker) for one in candidates}) > 1,
            lambda one: engines.get(one.worker, "?"),
        ),
        ("does", legs, lambda one: LEGS[one.leg]),
        (adapter, bool(adapter), lambda one: "must load" if one.loads_lora else "holds"),
        ("cached", True, lambda one: f"{one.cached_blocks} of {decision.blocks}"),
        ("of those assumed", any(one.assumed_blocks for one in candidates), lambda one: one.assumed_blocks),
        ("lower tier", True, lambda one: one.lower_blocks),
        ("queued tokens", True, lambda one: one.prefill_tokens),
        ("held blocks", True, lambda one: one.decode_blocks),
        ("requests", True, lambda one: one.requests),
        ("queue ms", timed, lambda one: f"{one.queue_ms:.1f}"),
        ("prefill ms", timed, lambda one: f"{one.prefill_ms:.1f}"),
        ("transfer ms", timed and legs, lambda one: f"{one.transfer_ms:.1f}"),
        ("others ms", timed, lambda one: f"{cost_terms(one, decision).others:.1f}"),
        ("rest ms", timed, lambda one: f"{cost_terms(one, decision).rest:.1f}"),
        ("ITL ms", decoded, lambda one: f"{one.itl_ms:.1f}" if one.itl_ms else "-"),
        ("E2E ms", decoded, lambda one: f"{e2e_ms:.1f}" if (e2e_ms := decision.e2e_ms(one)) else "-"),
        ("cost ms" if timed else "cost", True, lambda one: f"{one.score:.2f}"),
    ]
    return [(title, cell) for title, is_shown, cell in every if is_shown]


def _head(decision: Decision, position: int) -> str:
    """What was decided about, when, and after how long in the queue."""
    needs = decision.constraints.needs
    image = f" of {_encoded_kind(needs)}'s embedding" if "encode" in needs else ""
    waited = f", after {decision.waited_ms} ms in the queue" if decision.waited_ms else ""
    return (
        f"{decision.request}: {decision.prompt_tokens} {'' if image else 'prompt '}tokens{image} in {decision.blocks} full blocks; "
        f"decided at log position {decision.position}, stored at {position}{waited}; {utc_time(decision.wall_ns)}"
    )


def _rest(decision: Decision) -> list[str]:
    """Return how many candidates the table does not have."""
    rest = decision.scored - len(decision.candidates)
    return [f"and {rest:,} more of {decision.scored:,} candidates: --all shows them"] if rest > 0 else []


def explain_draws(decision: Decision) -> list[str]:
    """The engine, the revision and the policy that were drawn, and how; a revision that the query demanded too."""
    draws = (
        ("engine", decision.draw),
        ("revision", decision.revision_draw),
        ("policy", decision.policy_draw),
    )
    explanations = [why_drawn(subject, draw, decision) for subject, draw in draws if draw is not None]
    if decision.constraints.revision:
        explanations.append(f"revision {decision.revision}: the only one that the query allowed")
    return explanations


def why_drawn(subject: str, draw: Draw, decision: Decision) -> str:
    """The engine, revision or policy, and how weights selected it."""
    weights = " ".join(f"{name}={weight:g}" for name, weight in draw.weights)
    by = drawing_key(decision.preferences, decision.seed)
    if draw.drawn == draw.used:
        return f"{subject} {draw.used}: drawn by weights {weights}, {by}"
    return f"{subject} {draw.used} in place of {draw.drawn}, drawn by weights {weights}, {by}: {draw.reason}"


def why(decision: Decision, engines: Mapping[str, str], *, timed: bool) -> str:
    """Return in a few words why the chosen worker was chosen."""
    chosen, draw = decision.chosen, decision.draw
    offered = [
        considered
        for considered in decision.candidates
        if draw is None or engines.get(considered.worker) == draw.used
    ]
    if decision.revision_draw is not None:
        # The record does not say of which revision the others are.
        offered = [chosen]
    # The log may lack the joining of a worker.
    least = min(candidate.score for candidate in [*offered, chosen])
    if decision.constraints.pinned:
        return "the request was for this worker only"
    if decision.preferences.policy != "kv":
        return f"policy {decision.preferences.policy}; its cost is {chosen.score - least:.2f} above the least"
    if chosen.score > least:
        if decision.preferences.temperature:
            return f"drawn at temperature {decision.preferences.temperature:g}; its cost is {chosen.score - least:.2f} above the least"
        return f"a prompt with so little to compute is not handed over; the least cost was {least:.2f}"
    ties = sum(1 for candidate in offered if candidate.score == chosen.score)
    unit = "ms" if timed else "blocks"
    drawn = f" (drawn among {ties} equal)" if ties > 1 else ""
    return f"least cost, {chosen.score:.2f} {unit}{drawn}"


class CostTerms(NamedTuple):
    """What a cost in milliseconds is the sum of: `others` is what they lose by it, `rest` queued prompts, memory, adapters and tiers."""

    queue: float
    prefill: float
    transfer: float
    others: float
    rest: float


def cost_terms(candidate: Candidate, decision: Decision) -> CostTerms:
    """The cost of a candidate of which times are known, term by term."""
    weights = weights_at(cost_weights(decision.weights), decision.spare)
    known = (
        weights.prefill * candidate.queue_ms,
        weights.prefill * candidate.prefill_ms,
        candidate.transfer_ms,
        delay_of_others(
            weights.crowding, weights.arrivals, candidate.requests, candidate.queue_ms, candidate.prefill_ms
        ),
    )
    return CostTerms(*known, candidate.score - sum(known))


def event_line(event: Event) -> str:
    """An event of a request's life as a line of text."""
    if isinstance(event, RequestEncoded):
        return _encoded_line(event)
    if isinstance(event, RequestAccepted) and event.media:
        rest = event_line(msgspec.structs.replace(event, media=()))
        return f"{rest}; {_media_text(event.media)}"
    fields = [
        f"{name.removesuffix('_ms').removesuffix('_tokens').replace('_', ' ')} {_text(name, value)}"
        for name, value in msgspec.structs.asdict(event).items()
        if name not in HIDDEN | TIMES and value not in ("", (), b"", -1) and (value or name not in IF_ANY)
    ]
    kind = type(event).__struct_config__.tag
    return f"{kind}: {', '.join(fields)}" if fields else str(kind)


def _encoded_kind(needs: Sequence[str]) -> str:
    """Return which kind of media an encode worker with these capabilities was asked to encode."""
    return ONE[next((kind for kind, needed in ENCODE_NEEDS.items() if set(needed) == set(needs)), "image")]


def _media_text(places: Sequence[MediaPlace]) -> str:
    """The media of a prompt with their places."""
    return ", ".join(
        f"{place.kind} {place.id} ({place.tokens} tokens from {place.start} on)" for place in places
    )


def _encoded_line(event: RequestEncoded) -> str:
    """Return how an item of media came to its embedding, and the estimate by which an encode worker was preferred to the serving one."""
    how = ENCODED[event.outcome].format(worker=f"{event.worker}.{event.epoch}")
    parts = [
        f"req.encoded: {event.image}, {event.tokens} tokens: {how}, after {event.encode_ms} ms",
        f"choice {event.choice}, attempt {event.attempt}",
    ]
    if event.here_ms:
        parts.append(
            f"expected: {event.apart_ms} ms apart, {event.here_ms} ms on the serving worker with the delay of others"
        )
    if event.ahead_max == ANY_AHEAD:
        parts.append("the edge always uses encode workers (--encode-legs)")
    elif event.ahead_max >= 0:
        parts.append(
            f"the serving worker was expected to be faster with more than {event.ahead_max} tokens of other items ahead of it"
        )
    if event.reason:
        parts.append(event.reason)
    return "; ".join(parts)


def _text(name: str, value: object) -> str:
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 16 else f"{value[:8].hex()}… ({len(value)} bytes)"
    if name.endswith("_ms"):
        return f"{value} ms"
    return f"{value} tokens" if name.endswith("_tokens") else str(value)
