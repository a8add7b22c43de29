"""A decision and the events of a request as text for people: the candidates as a table, why one was chosen, and what became of it."""

from collections.abc import Mapping, Sequence
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


class Shown(NamedTuple):
    """What a table of candidates has columns for, besides those that all have: engines that differ, legs, credit, step times, and times of decoding."""

    engines: bool
    legs: bool
    assumed: bool
    times: bool
    decoding: bool


def _shown(candidates: Sequence[Candidate], engines: Mapping[str, str]) -> Shown:
    times = any(candidate.prefill_ms for candidate in candidates)
    return Shown(
        engines=len({engines.get(candidate.worker) for candidate in candidates}) > 1,
        legs=any(candidate.leg for candidate in candidates),
        assumed=any(candidate.assumed_blocks for candidate in candidates),
        times=times,
        decoding=times and any(candidate.itl_ms for candidate in candidates),
    )


def describe(
    decision: Decision,
    position: int,
    after: Sequence[str] = (),
    engines: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A decision for people: what each worker had, what it would have cost, and which was taken."""
    shown = _shown(decision.candidates, engines)
    rows = [
        _row(candidate, decision, engines, shown)
        for candidate in sorted(decision.candidates, key=lambda candidate: candidate.score)
    ]
    does = f" ({LEGS[decision.leg]})" if shown.legs else ""
    spread = f" (standard deviation {decision.output_deviation})" if decision.output_deviation else ""
    expected = (
        [f"E2E: of {decision.output_tokens} output tokens{spread}, at most {decision.max_tokens}"]
        if shown.decoding
        else []
    )
    lines = [
        _head(decision, position),
        table(_columns(decision, shown), rows),
        *_rest(decision),
        *expected,
        *explain_draws(decision),
        f"{decision.worker}{does}: {why(decision, engines, timed=shown.times)}",
    ]
    return "\n".join(lines + [f"  later: {line}" for line in after])


def _head(decision: Decision, position: int) -> str:
    """What was decided about, when, and after how long in the queue."""
    needs = decision.constraints.needs
    image = f" of {_encoded_kind(needs)}'s embedding" if "encode" in needs else ""
    waited = f", after {decision.waited_ms} ms in the queue" if decision.waited_ms else ""
    return (
        f"{decision.request}: {decision.prompt_tokens} {'' if image else 'prompt '}tokens{image} in {decision.blocks} full blocks; "
        f"decided at log position {decision.position}, stored at {position}{waited}; {utc_time(decision.wall_ns)}"
    )


def _columns(decision: Decision, shown: Shown) -> tuple[str, ...]:
    """The titles of the table's columns."""
    return (
        "",
        "worker",
        *(("engine",) if shown.engines else ()),
        *(("does",) if shown.legs else ()),
        *((decision.constraints.lora_name,) if decision.constraints.lora_name else ()),
        "cached",
        *(("of those assumed",) if shown.assumed else ()),
        *("lower tier", "queued tokens", "held blocks", "requests"),
        *(
            (
                "queue ms",
                "prefill ms",
                *(("transfer ms",) if shown.legs else ()),
                "others ms",
                "rest ms",
            )
            if shown.times
            else ()
        ),
        *(("ITL ms", "E2E ms") if shown.decoding else ()),
        "cost ms" if shown.times else "cost",
    )


def _row(
    candidate: Candidate, decision: Decision, engines: Mapping[str, str], shown: Shown
) -> tuple[object, ...]:
    """A candidate, in the columns of the table."""
    return (
        "->" if candidate.worker == decision.worker else "",
        candidate.worker,
        *((engines.get(candidate.worker, "?"),) if shown.engines else ()),
        *((LEGS[candidate.leg],) if shown.legs else ()),
        *(("must load" if candidate.loads_lora else "holds",) if decision.constraints.lora_name else ()),
        f"{candidate.cached_blocks} of {decision.blocks}",
        *((candidate.assumed_blocks,) if shown.assumed else ()),
        candidate.lower_blocks,
        candidate.prefill_tokens,
        candidate.decode_blocks,
        candidate.requests,
        *(_times(candidate, decision, shown.legs) if shown.times else ()),
        *(_decode_times(candidate, decision) if shown.decoding else ()),
        f"{candidate.score:.2f}",
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
    found = [why_drawn(what, draw, decision) for what, draw in draws if draw is not None]
    if decision.constraints.revision:
        found.append(f"revision {decision.revision}: the only one that the query allowed")
    return found


def why_drawn(what: str, draw: Draw, decision: Decision) -> str:
    """The engine, revision or policy, and how weights selected it."""
    weights = " ".join(f"{name}={weight:g}" for name, weight in draw.weights)
    by = drawing_key(decision.preferences, decision.seed)
    if draw.drawn == draw.used:
        return f"{what} {draw.used}: drawn by weights {weights}, {by}"
    return f"{what} {draw.used} in place of {draw.drawn}, drawn by weights {weights}, {by}: {draw.reason}"


def why(decision: Decision, engines: Mapping[str, str], *, timed: bool) -> str:
    """Return in a few words why the chosen worker was chosen."""
    chosen, draw = decision.chosen, decision.draw
    offered = [one for one in decision.candidates if draw is None or engines.get(one.worker) == draw.used]
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


def _times(candidate: Candidate, decision: Decision, split: bool) -> tuple[str, ...]:
    """The estimated times of queue, prefill and transfer, and the other terms of the cost."""
    terms = cost_terms(candidate, decision)
    return (
        f"{candidate.queue_ms:.1f}",
        f"{candidate.prefill_ms:.1f}",
        *((f"{candidate.transfer_ms:.1f}",) if split else ()),
        f"{terms.others:.1f}",
        f"{terms.rest:.1f}",
    )


def _decode_times(candidate: Candidate, decision: Decision) -> tuple[str, str]:
    """Return the times between two tokens and from the decision to the last one, which are not part of the cost; "-" where unknown."""
    e2e_ms = decision.e2e_ms(candidate)
    return (
        f"{candidate.itl_ms:.1f}" if candidate.itl_ms else "-",
        f"{e2e_ms:.1f}" if e2e_ms else "-",
    )


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
    return ONE[next((kind for kind, wanted in ENCODE_NEEDS.items() if set(wanted) == set(needs)), "image")]


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
