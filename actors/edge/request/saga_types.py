"""The vocabulary of a request's saga: its state, the events that drive it, the effects that it asks for. Values only.

Three effects are answered by an event that carries the same `number`: `AskRouter` by `Routed`, `RouterRefused` or
`RouterUnanswered`; `Dispatch` by `LegAccepted`, `LegRefused` or `LegUnanswered`; `PauseSearch` by `RetryDue`. All others
are carried out at once and have no answer.
"""

from typing import Literal

import msgspec

from headwater.actors.edge.request.placement import Placement
from headwater.actors.http.errors import ApiError
from headwater.schemas.constraints import NO_CONSTRAINTS, Constraints
from headwater.schemas.events.request import RequestEvent, SagaState
from headwater.schemas.events.route import Decision, RouteRefused
from headwater.schemas.messages.handoff import Handoff
from headwater.schemas.messages.inference import FrameEntry, Leg, Sampling, TokenLogprob
from headwater.schemas.tables.card import MIGRATIONS_MAX

End = Literal["stop", "length", "cancelled", "error"]
Awaited = Literal["", "route", "dispatch", "pause"]


class ChoiceSpec(msgspec.Struct, frozen=True):
    """What never changes about a choice. `guide_param` is the request field that asked for guided decoding.

    `constraints` are those of the request itself; each query adds what follows from the state. `tokenizer` is the digest of
    the tokenizer that its tokens are of.
    """

    request: str
    index: int
    sampling: Sampling
    constraints: Constraints = NO_CONSTRAINTS
    guide_param: str = ""
    cache_salt: str = ""
    priority: int = 0
    tokenizer: str = ""
    migrations_max: int = MIGRATIONS_MAX


class Attempt(msgspec.Struct, frozen=True):
    """One leg at one worker. `first` tokens had been emitted when it began; `name` identifies it in every log."""

    number: int = 0
    name: str = ""
    worker: str = ""
    epoch: int = 0
    leg: Leg = ""
    began_s: float = 0.0
    first: int = 0
    accepted: bool = False


class KvHolder(msgspec.Struct, frozen=True):
    """The worker that holds the KV of a completed prefill leg until `until_s`. It is cancelled to release that KV."""

    worker: str
    epoch: int
    attempt: str
    pairs_with: str
    handoff: Handoff | None
    until_s: float


class Saga(msgspec.Struct, frozen=True):
    """The state of one choice. `emitted` counts its tokens over all workers.

    `attempt` is the leg that runs (`streaming`) or ran last; `attempts` counts all. `awaits` is the effect whose
    answer is outstanding. `holder` is set in state `handoff`, and until the first token of the decode leg. `died_with` are
    the incarnations of workers, as "<worker>.<epoch>", that ended with it: see `migration.is_blamed`. `gone` are those that said
    that their engine is dead, or that they are shutting down.
    """

    spec: ChoiceSpec
    state: SagaState = "routing"
    emitted: int = 0
    cached_tokens: int = -1
    attempt: Attempt = Attempt()
    attempts: int = 0
    streaming: bool = False
    awaits: Awaited = ""
    placement: Placement | None = None
    decision: Decision | None = None
    holder: KvHolder | None = None
    prefilled_by: str = ""
    migrations: int = 0
    died_with: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    end: End | None = None

    @property
    def deaths(self) -> int:
        """How many incarnations ended with it."""
        return len(self.died_with)

    def died_on(self, worker: str, epoch: int) -> "Saga":
        """An incarnation of a worker died with it. It counts once: the router may name one again that is ending already."""
        incarnation = f"{worker}.{epoch}"
        if incarnation in self.died_with:
            return self
        return msgspec.structs.replace(self, died_with=(*self.died_with, incarnation))

    @property
    def awaited(self) -> KvHolder | None:
        """The holder that still computes the prompt, as far as is known, while the decode leg waits for it in a room."""
        handoff = self.holder.handoff if self.holder is not None else None
        in_room = handoff is not None and handoff.choreography == "room"
        return self.holder if in_room and self.streaming and self.attempt.leg == "decode" else None

    @property
    def received(self) -> int:
        """Tokens that the running attempt has sent."""
        return self.emitted - self.attempt.first


# Events.


class Opened(msgspec.Struct, frozen=True):
    """The request was accepted. `pinned` names the worker of an earlier choice of the same prompt."""

    pinned: str
    now_s: float


class Routed(msgspec.Struct, frozen=True):
    """The router named a worker, after the query had waited `waited_s` in its queue."""

    number: int
    decision: Decision
    waited_s: float
    now_s: float


class RouterRefused(msgspec.Struct, frozen=True):
    """The router named no worker."""

    number: int
    refusal: RouteRefused
    waited_s: float
    now_s: float


class RouterUnanswered(msgspec.Struct, frozen=True):
    """No router replied."""

    number: int
    reason: str
    waited_s: float
    now_s: float


class RetryDue(msgspec.Struct, frozen=True):
    """The pause is over."""

    number: int
    now_s: float


class LegAccepted(msgspec.Struct, frozen=True):
    """The worker replied that it runs the leg."""

    number: int
    now_s: float


class LegRefused(msgspec.Struct, frozen=True):
    """The worker replied that it does not. The other fields are those of `Refused`."""

    number: int
    reason: str
    retryable: bool
    spent: bool
    param: str
    now_s: float
    gone: bool = False


class LegUnanswered(msgspec.Struct, frozen=True):
    """The worker did not reply. It may run the leg all the same, unless the request was not even `delivered`."""

    number: int
    reason: str
    delivered: bool
    now_s: float


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Tokens, or the end of a prefill leg. Any other end in `entry` follows as a `LegFinished`."""

    entry: FrameEntry
    now_s: float


class LegFinished(msgspec.Struct, frozen=True):
    """The engine ended the leg after `position` tokens. The other fields are those of `FrameEntry`."""

    position: int
    finish: str
    detail: str
    param: str
    now_s: float


class LegLost(msgspec.Struct, frozen=True):
    """The worker of attempt `number` died, or, without `died`, no longer has the request."""

    number: int
    reason: str
    now_s: float
    died: bool = True


class HolderLost(msgspec.Struct, frozen=True):
    """The prefill leg `attempt` failed, or its worker died, while another worker waits for its KV.

    `finish` is the leg's, "lost" for a worker that is.
    """

    attempt: str
    reason: str
    now_s: float
    finish: str = "lost"


class TimedOut(msgspec.Struct, frozen=True):
    """The prefill leg `number` takes too long."""

    number: int
    now_s: float


class StopMatched(msgspec.Struct, frozen=True):
    """The text contains a stop string: the answer is complete although the worker still generates."""


class Cancelled(msgspec.Struct, frozen=True):
    """The client disconnected."""


class Aborted(msgspec.Struct, frozen=True):
    """The edge ends the request."""

    error: ApiError


SagaEvent = (
    Opened
    | Routed
    | RouterRefused
    | RouterUnanswered
    | RetryDue
    | LegAccepted
    | LegRefused
    | LegUnanswered
    | Frame
    | LegFinished
    | LegLost
    | HolderLost
    | TimedOut
    | StopMatched
    | Cancelled
    | Aborted
)

# Effects.


class AskRouter(msgspec.Struct, frozen=True):
    """Query the router for a worker for `attempt`. `may_wait`: the query may join its queue."""

    number: int
    attempt: str
    constraints: Constraints
    may_wait: bool = True


class Dispatch(msgspec.Struct, frozen=True):
    """Send the request, with all tokens emitted so far, to a worker, and receive its frames from now on."""

    attempt: Attempt
    handoff: Handoff | None


class PauseSearch(msgspec.Struct, frozen=True):
    """Wait before the next query."""

    number: int
    seconds: float


class CancelAttempt(msgspec.Struct, frozen=True):
    """Stop an attempt, or release the KV that it left. `fetched`: the decode worker has that KV, so nothing is stopped."""

    worker: str
    epoch: int
    attempt: str
    fetched: bool = False


class Detach(msgspec.Struct, frozen=True):
    """Receive no more frames of the running attempt. `follows`: only learn how it ends, until it is cancelled."""

    follows: bool = False


class AskStatus(msgspec.Struct, frozen=True):
    """Query the worker for the tokens that a lost frame contained."""


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Pass new tokens to the client: in order, each once. Always the last effect of a step."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class RecordEvent(msgspec.Struct, frozen=True):
    """Write to the request log."""

    event: RequestEvent


class Finish(msgspec.Struct, frozen=True):
    """The choice ended. Occurs once."""

    end: End
    error: ApiError | None = None


AwaitedEffect = AskRouter | Dispatch | PauseSearch
Effect = AwaitedEffect | CancelAttempt | Detach | AskStatus | Emit | RecordEvent | Finish
