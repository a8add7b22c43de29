"""The hand-offs that one life of a worker holds: prompts whose KV it keeps for another worker.

    offered ──claimed──► granted ──done──► forgotten
       └──────expired, released──────────► given back to the engine

The engine's parameters are given away once: who claims first gets them, whoever comes later, or with another
prompt, is told why not. Until it is claimed a hand-off can be given up, and is when its time is over, so no KV stays
pinned. One that was claimed is the engines' own affair; it is remembered, so that a late claim is answered truly.
"""

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from headwater.engines.engine import Pinned
from headwater.schemas.clock import Clock
from headwater.schemas.handoff import (
    Choreography,
    Handoff,
    HandoffClaim,
    HandoffDenied,
    HandoffGranted,
    HandoffReply,
    Spent,
    prompt_digest,
)
from headwater.schemas.inference import GenerateRequest

REMEMBERED_MAX = 4_096
"""Spent hand-offs remembered for claims that come too late; the oldest is forgotten first and then unknown."""


class _Stage(Enum):
    OFFERED = "offered"
    GRANTED = "granted"


class _Open:
    __slots__ = ("expires_s", "handoff", "pinned", "request", "stage")

    def __init__(self, handoff: Handoff, request: str, pinned: Pinned, expires_s: float) -> None:
        self.handoff = handoff
        self.request = request
        self.pinned = pinned
        self.expires_s = expires_s
        self.stage = _Stage.OFFERED


class GivenUp(NamedTuple):
    """KV that nobody will fetch: the engine is to free it."""

    request: str
    params: bytes


class Handoffs:
    """See the module. Time is the clock's monotonic one."""

    def __init__(self, worker: str, clock: Clock, choreography: Choreography) -> None:
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
        """Hand-offs nobody has claimed yet."""
        return sum(one.stage is _Stage.OFFERED for one in self._open.values())

    def begin(self, epoch: int) -> list[GivenUp]:
        """A new life: what the one before it offered is void."""
        given_up = [give for one in list(self._open.values()) if (give := self._close(one, "released"))]
        self._epoch = epoch
        self._spent.clear()
        return given_up

    def offer(self, request: GenerateRequest, pinned: Pinned, name: str) -> Handoff:
        """Keep `pinned` for whoever claims it under `name`, which must not be guessable."""
        handoff = Handoff(
            name,
            self._worker,
            self._epoch,
            prompt_digest(request.lora_name, request.cache_salt, request.tokens),
            len(request.tokens) // 4,
            round(pinned.lease_s * 1000),
            self._choreography,
        )
        expires_s = self._clock.monotonic_s() + pinned.lease_s
        self._open[name] = _Open(handoff, request.request, pinned, expires_s)
        self._by_request[request.request] = name
        return handoff

    def claim(self, claim: HandoffClaim) -> HandoffReply:
        """Give the parameters away, this once."""
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

    def end(self, request: str) -> GivenUp | None:
        """The edge is through with the prefill leg `request`: its KV was fetched, or nobody wants it."""
        name = self._by_request.get(request)
        return self._close(self._open[name], "released") if name is not None else None

    def forsake(self) -> list[GivenUp]:
        """Give up all that nobody has claimed."""
        offered = [one for one in self._open.values() if one.stage is _Stage.OFFERED]
        return [give for one in offered if (give := self._close(one, "released"))]

    def expire(self) -> list[GivenUp]:
        """Give up what was not claimed in time; forget what was claimed and must have been fetched by now."""
        now = self._clock.monotonic_s()
        due = [one for one in self._open.values() if now >= one.expires_s]
        return [give for one in due if (give := self._close(one, "expired"))]

    def _close(self, one: _Open, reason: Spent) -> GivenUp | None:
        del self._open[one.handoff.id]
        self._by_request.pop(one.request, None)
        claimed = one.stage is _Stage.GRANTED
        self._spent[one.handoff.id] = "consumed" if claimed else reason
        if len(self._spent) > REMEMBERED_MAX:
            self._spent.popitem(last=False)
        return None if claimed else GivenUp(one.request, one.pinned.params)
