"""What a saga tells whoever answers its client, and who holds the KV of its prompt."""

from typing import TYPE_CHECKING, Protocol

from headwater.actors.edge.machine import Cause
from headwater.schemas.handoff import Handoff
from headwater.schemas.inference import TokenLogprob
from headwater.schemas.request import SagaState

if TYPE_CHECKING:
    from headwater.actors.edge.saga import Saga


class Holder:
    """Who holds the KV of a finished prefill leg: it is to be told when that is fetched, or not wanted."""

    __slots__ = ("attempt", "epoch", "handoff", "pairs_with", "until_s", "worker")

    def __init__(self, saga: "Saga", handoff: Handoff | None, now_s: float) -> None:
        self.worker, self.epoch, self.attempt = saga.worker, saga.epoch, saga.attempt
        self.pairs_with = saga.decision.pairs_with if saga.decision is not None else ""
        self.handoff = handoff
        self.until_s = now_s + handoff.expires_ms / 1000 if handoff is not None else 0.0


class Sink(Protocol):
    """Whoever turns a choice's tokens into an HTTP response. Called on the event loop; must not wait."""

    def on_placed(self, saga: "Saga") -> None:
        """A worker took the choice, the rest of it, or its prompt: `saga.leg` says which."""
        ...

    def on_prefilled(self, saga: "Saga", handoff: str, seconds: float) -> None:
        """The prompt is computed."""
        ...

    def on_setback(self, saga: "Saga", before: SagaState, cause: Cause, reason: str, handoff: str) -> None:
        """A state was left backwards; `saga.state` is the one it is in now."""
        ...

    def on_tokens(self, saga: "Saga", tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """New tokens, in order, each once."""
        ...

    def on_end(self, saga: "Saga") -> None:
        """The choice ended; `saga.end` says how."""
        ...
