"""The hand-offs of one incarnation: prompts whose KV the worker keeps for another worker.

    offered ──claimed──► granted ──done──► removed
       └──expired, released, abandoned──► KV released to the engine

The engine's parameters are granted once: to the first claim with the right prompt; every other claim is denied with
the reason. An offered hand-off can be abandoned, and expires when its lease ends, so that no KV stays pinned. After it
was granted, the two engines complete the transfer between them; the hand-off is remembered, so that a late claim is
denied for the right reason.
"""

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from headwater.engines.engine import Pinned
from headwater.schemas.clock import Clock
from headwater.schemas.messages.handoff import (
    Choreography,
    Handoff,
    HandoffClaim,
    HandoffDenied,
    HandoffGranted,
    HandoffReply,
    Spent,
    prompt_digest,
)
from headwater.schemas.messages.inference import GenerateRequest

REMEMBERED_MAX = 4_096
"""Closed hand-offs remembered for late claims; the oldest is dropped first and is unknown from then on."""


class _Stage(Enum):
    OFFERED = "offered"
    GRANTED = "granted"


class _Open:
    __slots__ = ("edge", "expires_s", "handoff", "pinned", "request", "stage")

    def __init__(
        self, handoff: Handoff, request: str, edge: tuple[str, int], pinned: Pinned, expires_s: float
    ) -> None:
        self.handoff = handoff
        self.request = request
        self.edge = edge
        self.pinned = pinned
        self.expires_s = expires_s
        self.stage = _Stage.OFFERED


class UnclaimedKv(NamedTuple):
    """KV that no worker will fetch, or that one has fetched from an engine that does not notice: the engine is to free it."""

    request: str
    params: bytes


class Handoffs:
    """See the module. All times are monotonic."""

    def __init__(
        self, worker: str, clock: Clock, choreography: Choreography, *, notices_fetches: bool = True
    ) -> None:
        self._notices_fetches = notices_fetches
        self._worker = worker
        self._clock = clock
        self._choreography: Choreography = choreography
        self._epoch = 0
        self._open: dict[str, _Open] = {}
        self._by_request: dict[str, str] = {}
        self._spent: OrderedDict[str, Spent] = OrderedDict()

    def __len__(self) -> int:
        """Hand-offs that are offered, or granted and not known to be fetched."""
        return len(self._open)

    @property
    def offered(self) -> int:
        """Hand-offs that are not claimed yet."""
        return sum(one.stage is _Stage.OFFERED for one in self._open.values())

    def begin_incarnation(self, epoch: int) -> list[UnclaimedKv]:
        """A new incarnation: the offers of the earlier one are void. Returns their KV."""
        unclaimed = self._close_all(list(self._open.values()), "released")
        self._epoch = epoch
        self._spent.clear()
        return unclaimed

    def offer(self, request: GenerateRequest, pinned: Pinned, name: str) -> Handoff:
        """Keep `pinned` for the worker that claims it under `name`, which must not be guessable."""
        handoff = Handoff(
            name,
            self._worker,
            self._epoch,
            prompt_digest(request.lora_name, request.cache_salt, request.tokens, request.media),
            len(request.tokens) // 4,
            round(pinned.lease_s * 1000),
            self._choreography,
        )
        expires_s = self._clock.monotonic_s() + pinned.lease_s
        edge = (request.edge, request.edge_epoch)
        self._open[name] = _Open(handoff, request.request, edge, pinned, expires_s)
        self._by_request[request.request] = name
        return handoff

    def claim(self, claim: HandoffClaim) -> HandoffReply:
        """Grant the parameters to this claim, or deny it."""
        one = self._open.get(claim.id)
        if one is None:
            return HandoffDenied(self._spent.get(claim.id, "unknown"))
        if one.stage is _Stage.GRANTED:
            return HandoffDenied("consumed")
        if self._clock.monotonic_s() >= one.expires_s:
            return HandoffDenied("expired")
        if claim.prompt != one.handoff.prompt:
            return HandoffDenied("other prompt")
        one.stage = _Stage.GRANTED
        return HandoffGranted(one.pinned.params, one.pinned.first_tokens)

    def release(self, request: str) -> list[UnclaimedKv]:
        """The edge is done with the prefill leg `request`: its KV was fetched, or its client is gone."""
        name = self._by_request.get(request)
        return self._close_all([self._open[name]], "released") if name is not None else []

    def edges(self) -> list[tuple[str, int]]:
        """Name and epoch of each edge whose requests have hand-offs that are not claimed; without those that answer for no request."""
        offered = (one for one in self._open.values() if one.stage is _Stage.OFFERED)
        return list(dict.fromkeys(one.edge for one in offered if one.edge[1]))

    def release_edge(self, edge: tuple[str, int]) -> list[UnclaimedKv]:
        """This edge, by name and epoch, is gone: close what no worker has claimed for its requests."""
        offered = [one for one in self._open.values() if one.stage is _Stage.OFFERED and one.edge == edge]
        return self._close_all(offered, "released")

    def abandon(self) -> list[UnclaimedKv]:
        """Close all that are not claimed."""
        return self._close_all(
            [one for one in self._open.values() if one.stage is _Stage.OFFERED], "released"
        )

    def expire(self) -> list[UnclaimedKv]:
        """Close those not claimed in time, and those granted, whose KV must have been fetched by now."""
        now = self._clock.monotonic_s()
        return self._close_all([one for one in self._open.values() if now >= one.expires_s], "expired")

    def _close_all(self, handoffs: list[_Open], reason: Spent) -> list[UnclaimedKv]:
        return [kv for one in handoffs if (kv := self._close(one, reason))]

    def _close(self, one: _Open, reason: Spent) -> UnclaimedKv | None:
        del self._open[one.handoff.id]
        self._by_request.pop(one.request, None)
        claimed = one.stage is _Stage.GRANTED
        self._spent[one.handoff.id] = "consumed" if claimed else reason
        if len(self._spent) > REMEMBERED_MAX:
            self._spent.popitem(last=False)
        if claimed and self._notices_fetches:
            return None
        return UnclaimedKv(one.request, one.pinned.params)
