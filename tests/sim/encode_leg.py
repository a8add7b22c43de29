"""The states of a request with images in a simulated fleet, each seen at the moment at which the request comes to it.

asked ► accepted ► encoding ► stored ► dispatched ► claimed ► read ► prefill ► handoff ► decode
"""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec
import pytest

from headwater.actors.edge.saga import driver
from headwater.actors.edge.saga.placement import EncodeLeg, Encoders
from headwater.actors.edge.saga.saga import step
from headwater.actors.edge.saga.types import Effect, Saga, SagaEvent
from headwater.engines.sim.engine import SimEngine
from headwater.engines.sim.model import SimEncoder
from headwater.engines.transfer.local import LocalTransfer, TransferFault
from headwater.ops.sim.fleet import SimFleet
from headwater.schemas.encode_requests import EncodeRequest
from headwater.schemas.inference import GenerateRequest

State = Literal[
    "asked", "accepted", "encoding", "stored", "dispatched", "claimed", "read", "prefill", "handoff", "decode"
]
"""The image is with an encode worker, which has not seen it; it fetches the pixels; computes; has the embedding on offer, and the edge does not
know; the request is with the prefill worker, which has not claimed the offer; it reads; it has the embedding, and not begun; the request's own
states after that."""

STATES: Final[tuple[State, ...]] = State.__args__  # type: ignore[attr-defined]
BEFORE_THE_ANSWER: Final = STATES[: STATES.index("dispatched")]
"""The edge waits for the encode worker."""

PARTS: Final = ("encode", "prefill", "decode", "router", "edge")


class Struck(NamedTuple):
    """The request that came to the state, and the process that was killed there."""

    victim: str
    legs_open: int
    """Encode legs that edges waited for at that moment."""


class EncodeLegWatch:
    """Kills the process of the part `victim` when the first request comes to `state`, before anything else happens.

    The trace of the fleet's network is `seen`; everything else is called in place of what does the work.
    """

    def __init__(self, patch: pytest.MonkeyPatch, state: State, victim: str) -> None:
        self.struck: Struck | None = None
        self.fleet: SimFleet | None = None
        self.on_strike: Callable[[str], None] = lambda _: None
        self._state = state
        self._victim = victim
        self._with: dict[str, str] = {}
        """The worker of each part that the latest request is with."""
        self._open: set[str] = set()
        self._watch_edges(patch)
        self._watch_workers(patch)

    def seen(self, what: str, who: str, about: str, data: bytes = b"") -> None:
        """See `NetworkTrace`. Called before the message is handled."""
        if what != "delivered":
            return
        if about.endswith(".encode"):
            msgspec.msgpack.decode(data, type=EncodeRequest)
            self._arrive("asked", encode=who)
        elif about.endswith(".media"):
            self._arrive("accepted")
        elif about.endswith(".generate"):
            request = msgspec.msgpack.decode(data, type=GenerateRequest)
            if any(item.embedding is not None for item in request.media):
                self._arrive("dispatched", prefill=who)

    def _watch_edges(self, patch: pytest.MonkeyPatch) -> None:
        encode = Encoders.encode

        async def encode_watched(encoders: Encoders, leg: EncodeLeg, *rest: Any) -> Any:
            self._with["prefill"] = leg.decision.worker
            self._open.add(leg.attempt)
            try:
                return await encode(encoders, leg, *rest)
            finally:
                self._open.discard(leg.attempt)

        def step_watched(before: Saga, event: SagaEvent) -> tuple[Saga, list[Effect]]:
            saga, effects = step(before, event)
            worker = saga.attempt.worker
            if saga.state == "decode" and saga.emitted and saga.end is None:
                self._arrive("decode", decode=worker)
            elif saga.state == "handoff" and before.state != "handoff":
                self._arrive("handoff", prefill=worker)
            elif saga.state == "prefill" and saga.attempt.accepted:
                self._arrive("prefill", prefill=worker)
            return saga, effects

        patch.setattr(Encoders, "encode", encode_watched)
        patch.setattr(driver, "step", step_watched)

    def _watch_workers(self, patch: pytest.MonkeyPatch) -> None:
        compute, offer, put = SimEncoder._compute, LocalTransfer.offer, SimEngine.put_embedding
        disturbed = SimFleet._disturbed_read

        async def compute_watched(encoder: SimEncoder, *given: Any) -> Any:
            self._arrive("encoding")
            return await compute(encoder, *given)

        async def offer_watched(transfer: LocalTransfer, *given: Any, **named: Any) -> Any:
            made = await offer(transfer, *given, **named)
            self._arrive("stored", encode=transfer.owner)
            return made

        def read_watched(fleet: SimFleet) -> TransferFault:
            self._arrive("claimed")
            return disturbed(fleet)

        async def put_watched(engine: SimEngine, *given: Any) -> None:
            await put(engine, *given)
            self._arrive("read")

        patch.setattr(SimEncoder, "_compute", compute_watched)
        patch.setattr(LocalTransfer, "offer", offer_watched)
        patch.setattr(SimFleet, "_disturbed_read", read_watched)
        patch.setattr(SimEngine, "put_embedding", put_watched)

    def _arrive(self, state: State, **workers: str) -> None:
        self._with |= workers
        if self.struck is not None or self.fleet is None or state != self._state:
            return
        name = self._with.get(self._victim, f"{self._victim}-0")
        self.struck = Struck(name, len(self._open))
        # At once: what the process does from now on reaches nobody.
        self.fleet.processes[name].die()
        self.on_strike(name)
