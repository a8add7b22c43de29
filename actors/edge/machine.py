"""The states of one choice of one request, and what leads from one to another. A table, and nothing else.

    routing ──accepted──────────────────────────────► decode ──finished──► ended
       │  ▲                                              ▲ │
       │  └──lost, timed out, spent──┬──────────┬────────┼─┘
       └──prefill accepted──► prefill ──prefilled──► handoff ──accepted

A choice in `routing` has no worker. In `prefill` one computes its prompt, in `handoff` that prompt's KV waits at the
first worker for a second one, in `decode` a worker sends tokens. Every state can be cancelled, time out and fail.
"""

from typing import Final, Literal

from headwater.schemas.request import SagaState

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
"""accepted: a worker took what is left of the request. prefill accepted: one took its prompt. prefilled: it is
computed, or on its way. refused: the worker asked did not take it. spent: the hand-off can not be used any more.
lost: the worker is gone or gave the request up. timed out: the state took too long. cancelled: the client left, or
has enough. finished: the answer is whole. failed: it can not go on anywhere."""

SETBACKS: Final[frozenset[str]] = frozenset({"refused", "spent", "lost", "timed out"})
"""Causes that lead back; whatever else happens is told by events of its own."""

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
    # All tokens were there when the worker was lost.
    ("routing", "finished"): "ended",
    **{
        (state, cause): "ended"
        for state in ("routing", "prefill", "handoff", "decode")
        for cause in ("cancelled", "failed")
    },
}


class IllegalTransition(RuntimeError):
    """A mistake of ours: this can not happen in that state."""


def after(state: SagaState, cause: Cause) -> SagaState:
    """The state that `cause` leads to. Raises `IllegalTransition`."""
    try:
        return TRANSITIONS[state, cause]
    except KeyError:
        raise IllegalTransition(f"{cause!r} in state {state!r}") from None
