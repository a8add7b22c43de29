"""The states of one choice of one request, and the causes that lead from one to another. A table, nothing else.

    routing ──accepted──────────────────────────────► decode ──finished──► ended
       │  ▲                                              ▲ │
       │  └──lost, timed out, spent──┬──────────┬────────┼─┘
       └──prefill accepted──► prefill ──prefilled──► handoff ──accepted

In `routing` a choice has no worker. In `prefill` a worker computes its prompt; in `handoff` the prompt's KV waits there
for a second worker; in `decode` a worker sends tokens. Every state but `ended` can be cancelled and can fail.
"""

from typing import Final, Literal

from headwater.schemas.events.request import SagaState

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
