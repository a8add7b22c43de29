"""The vocabulary of a request's saga: its state, the events that drive it, the effects that it asks for. Values only.

Three effects are answered by an event that carries the same `number`: `AskRouter` by `Routed`, `RouterRefused` or
`RouterUnanswered`; `Dispatch` by `LegAccepted`, `LegRefused` or `LegUnanswered`; `PauseSearch` by `RetryDue`. All others
are carried out at once and have no answer.

A search lasts until its deadline. Time that a query spends in a router's queue does not count: the router bounds it.
A worker that refused is excluded from the next query, until the router has no other worker left. An incarnation that is gone is
never queried again: its worker may come back under a new epoch, which the search waits for.

    routing ──accepted──────────────────────────────► decode ──finished──► ended
       │  ▲                                              ▲ │
       │  └──lost, timed out, spent──┬──────────┬────────┼─┘
       └──prefill accepted──► prefill ──prefilled──► handoff ──accepted

In `routing` a choice has no worker. In `prefill` a worker computes its prompt; in `handoff` the prompt's KV waits there
for a second worker; in `decode` a worker sends tokens. Every state but `ended` can be cancelled and can fail.
"""

from typing import Final, Literal, Self

import msgspec

from headwater.actors.http.errors import ApiError, overloaded, refused_by_router
from headwater.schemas.events import RequestEvent, SagaState
from headwater.schemas.inference import FrameEntry, Handoff, Leg, Sampling, TokenLogprob
from headwater.schemas.routing import NO_CONSTRAINTS, Constraints, Decision, RouteRefused
from headwater.schemas.tables import MIGRATIONS_MAX

PLACE_S_MAX = 10.0
"""Seconds that a new request searches for a worker before it is refused with 503."""

MOVE_S_MAX = 120.0
"""Seconds that a request whose answer has begun searches for another worker. An engine that was the only one takes a minute to start
again: 64 s were measured on a GPU that three fleets shared."""

RETRY_S, RETRY_S_MAX = 0.1, 1.0
"""Seconds between two queries while the router names no worker, doubled from the first value to the last."""


class Placement(msgspec.Struct, frozen=True):
    """One search. `exclude` lists worker epochs as "<worker>.<epoch>" that are tried again once the router has no other,
    `gone` those that never are; `pinned` is the only worker to try first.

    `pauses` counts those of this search. `reason` and `retry_after_s` describe the last refusal. `origin` says, for a search
    that moves a request, what it moves away from; it is empty for a new request.
    """

    deadline_s: float
    pinned: str = ""
    pauses: int = 0
    exclude: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    reason: str = "no router replied"
    retry_after_s: float = 1.0
    origin: str = ""

    def pause_s(self, now_s: float) -> float:
        """Return how long to wait before the next query. The last one is at the deadline."""
        return min(RETRY_S * 2.0 ** min(self.pauses, 30), RETRY_S_MAX, max(0.0, self.deadline_s - now_s))

    def paused(self) -> Self:
        """Count a pause: the query is repeated after `pause_s`."""
        return msgspec.structs.replace(self, pauses=self.pauses + 1)

    def answered(self, answer: "RouteAnswer") -> tuple[Self, ApiError | None]:
        """Take the router's answer to the query, and return the error if it ends the search.

        The time that the query spent in the router's queue does not count.
        """
        search = self.extend(answer.waited_s)
        if isinstance(answer, Routed):
            return search, None
        if isinstance(answer, RouterUnanswered):
            search = msgspec.structs.replace(search, reason=f"no router replied ({answer.reason})")
        elif answer.refusal.for_good:
            return search, refused_by_router(answer.refusal)
        else:
            search = search._refused_by_router(answer.refusal)
        return search, search.expired(answer.now_s)

    def extend(self, seconds: float) -> Self:
        """Add time that does not count as part of the search."""
        return msgspec.structs.replace(self, deadline_s=self.deadline_s + seconds) if seconds else self

    def restart(self, deadline_s: float) -> Self:
        """Search until a later deadline."""
        return msgspec.structs.replace(self, deadline_s=max(self.deadline_s, deadline_s), pauses=0)

    def _refused_by_router(self, refusal: RouteRefused) -> Self:
        """Retry all workers. The reason of a worker that refused says more than "no other worker", so it is kept."""
        if self.pinned:
            return msgspec.structs.replace(self, pinned="")
        reason = self.reason if self.exclude and self.reason else refusal.reason
        retry_after_s = (
            max(self.retry_after_s, refusal.retry_after_s) if self.exclude else refusal.retry_after_s
        )
        return msgspec.structs.replace(self, exclude=(), reason=reason, retry_after_s=retry_after_s)

    def refused_by_worker(self, worker: str, epoch: int, reason: str, *, gone: bool = False) -> Self:
        """Exclude a worker that did not take its part; `gone`: this incarnation of it never will."""
        incarnation = f"{worker}.{epoch}"
        if gone:
            all_gone = self.gone if incarnation in self.gone else (*self.gone, incarnation)
            return msgspec.structs.replace(self, pinned="", gone=all_gone, reason=reason)
        return msgspec.structs.replace(self, pinned="", exclude=(*self.exclude, incarnation), reason=reason)

    def expired(self, now_s: float) -> ApiError | None:
        """The error that ends the search once its deadline has passed: 503."""
        if now_s < self.deadline_s:
            return None
        return overloaded(f"No worker could take the request: {self.reason}.", self.retry_after_s)


# State.

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
    revision: str = ""


class Saga(msgspec.Struct, frozen=True):
    """The state of one choice. `emitted` counts its tokens over all workers.

    `attempt` is the leg that runs (`streaming`) or ran last; `attempts` counts all. `awaits` is the effect whose
    answer is outstanding. `holder` is set in state `handoff`, and until the first token of the decode leg. `died_with` are
    the incarnations of workers, as "<worker>.<epoch>", that ended with it: see `saga.is_blamed`. `gone` are those that said
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
    given_up: bool = False
    """Was a prefilled prompt given up because no worker decoded, and none has taken the request since?"""
    unfetched: tuple[tuple[str, str], ...] = ()
    """Holders of its KV, and the workers that could not have it from them, as incarnations: their hosts may not reach each other."""
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
    """The request was accepted. `pinned` names the worker of an earlier choice of the same prompt.

    `attempts` were made before it came here; the last of them is `decided`, unless that is of another prompt.
    """

    pinned: str
    now_s: float
    attempts: int = 0
    decided: Decision | None = None


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


RouteAnswer = Routed | RouterRefused | RouterUnanswered


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
    | RouteAnswer
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


# Phases, and the causes that lead from one to another.

Cause = Literal[
    "accepted",
    "prefill accepted",
    "prefilled",
    "refused",
    "spent",
    "lost",
    "timed out",
    "cancelled",
    "finished",
    "failed",
]
"""accepted: a worker accepted the rest of the request. prefill accepted: a worker accepted its prompt. prefilled: the
prompt is computed, or about to be. refused: the chosen worker did not accept. spent: the hand-off can no longer be
claimed. lost: the worker died or aborted the request. timed out: the state took too long. cancelled: the client
disconnected. finished: the answer is complete. failed: the request cannot continue anywhere."""

SETBACKS: Final[frozenset[str]] = frozenset({"refused", "spent", "lost", "timed out"})
"""Causes that lead back. The request log has an event of its own for every other cause."""

TRANSITIONS: Final[dict[tuple[SagaState, Cause], SagaState]] = {
    ("routing", "accepted"): "decode",
    ("routing", "prefill accepted"): "prefill",
    ("routing", "refused"): "routing",
    ("prefill", "prefilled"): "handoff",
    ("prefill", "lost"): "routing",
    ("prefill", "timed out"): "routing",
    ("handoff", "accepted"): "decode",
    ("handoff", "refused"): "handoff",
    ("handoff", "spent"): "routing",
    ("handoff", "timed out"): "routing",
    ("decode", "lost"): "routing",
    ("decode", "timed out"): "routing",
    ("decode", "finished"): "ended",
    # All tokens had arrived when the worker was lost.
    ("routing", "finished"): "ended",
    **{
        (state, cause): "ended"
        for state in ("routing", "prefill", "handoff", "decode")
        for cause in ("cancelled", "failed")
    },
}


class IllegalTransition(RuntimeError):
    """A programming error: this cannot happen in that state."""


def after(state: SagaState, cause: Cause) -> SagaState:
    """The state that `cause` leads to. Raises `IllegalTransition`."""
    try:
        return TRANSITIONS[state, cause]
    except KeyError:
        raise IllegalTransition(f"{cause!r} in state {state!r}") from None
