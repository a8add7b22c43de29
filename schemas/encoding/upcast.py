"""Retired events, which are no longer written, and their conversion to the events that replaced them.

Fields of an event are only appended, with defaults. Any other change is a new tag: the old struct moves here under its old
tag, with a function that converts it to its replacement, so that readers handle only current events. A struct stays here
as long as logs may contain it.
"""

from collections.abc import Callable
from typing import Any

from headwater.schemas.constraints import Constraints, Preferences, RequestedLeg
from headwater.schemas.events.event import Event
from headwater.schemas.events.request import RequestRouted
from headwater.schemas.events.route import Candidate, Decision, Weights
from headwater.schemas.messages.inference import Leg


class RequestRoutedV1(Event, frozen=True, tag="req.routed"):
    """Written by schema version 1, without the choice and the decision."""

    request: str
    worker: str
    epoch: int
    decision_position: int
    emitted_tokens: int


class DecisionV1(Event, frozen=True, tag="route.decided"):
    """A decision with its constraints and preferences as fields of its own; `pairs_with` was both a constraint and a result."""

    number: int
    position: int
    seen: int
    wall_ns: int
    request: str
    prompt_tokens: int
    max_tokens: int
    blocks: int
    deepest: int
    following: int
    last: int
    pinned: str
    exclude: tuple[str, ...]
    policy: str
    weights: Weights
    seed: int
    worker: str
    epoch: int
    candidates: tuple[Candidate, ...]
    degraded: bool = False
    leg: Leg = ""
    asked: RequestedLeg = ""
    lora_name: str = ""
    needs: tuple[str, ...] = ()
    pairs_with: str = ""
    temperature: float = 0.0
    session: str = ""
    tier: str = ""
    tolerates: tuple[str, ...] = ()
    assumed: bytes = b""
    waited_ms: int = 0


RetiredEvent = RequestRoutedV1 | DecisionV1


def _routed(old: RequestRoutedV1) -> RequestRouted:
    return RequestRouted(old.request, 0, "", old.worker, old.epoch, old.emitted_tokens)


def _decided(old: DecisionV1) -> Decision:
    decode = old.asked == "decode"
    return Decision(
        number=old.number,
        position=old.position,
        seen=old.seen,
        wall_ns=old.wall_ns,
        request=old.request,
        prompt_tokens=old.prompt_tokens,
        max_tokens=old.max_tokens,
        blocks=old.blocks,
        deepest=old.deepest,
        following=old.following,
        last=old.last,
        constraints=Constraints(
            pinned=old.pinned,
            exclude=old.exclude,
            leg=old.asked,
            lora_name=old.lora_name,
            needs=old.needs,
            pairs_with=old.pairs_with if decode else "",
            tier=old.tier,
            tolerates=old.tolerates,
        ),
        preferences=Preferences(policy=old.policy, temperature=old.temperature, session=old.session),
        weights=old.weights,
        seed=old.seed,
        worker=old.worker,
        epoch=old.epoch,
        candidates=old.candidates,
        degraded=old.degraded,
        leg=old.leg,
        pairs_with="" if decode else old.pairs_with,
        assumed=old.assumed,
        waited_ms=old.waited_ms,
    )


UPCASTERS: dict[type[Event], Callable[[Any], Event]] = {RequestRoutedV1: _routed, DecisionV1: _decided}
