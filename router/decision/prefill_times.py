"""Milliseconds until a worker has computed a prompt: for the queue before it, and for itself.

Where a worker's load reports are late, it has computed more of its queue than they say: as much as its step times predict.
"""

from typing import Any, Final, NamedTuple

from headwater.router.decision.work import Times
from headwater.router.fold.prefill_time import BLOCK_FROM, BLOCK_TO, predict_ms
from headwater.schemas.jit import jitable

ASSUMED: Final = 0.5
"""Share of a report's age in which prompts may have been computed. A prompt that is taken for computed and is not costs more than one that is
computed and not taken for it: with 1, sessions that reuse nearly everything waited 2 % longer, and no other traffic less."""


class Computed(NamedTuple):
    """Prompts of a queue, and their tokens, that are computed by now, and the milliseconds spent on the next one."""

    prompts: int
    tokens: int
    spent_ms: float


@jitable
def estimate_computed(
    lengths: Any,
    times: Any,
    classes: int,
    pace: float,
    queue: Any,
    length: int,
    since_ns: int,
    age_ms: float,
    now_ns: int,
) -> Computed:
    """What a worker has computed of its queue between its latest report and now.

    The first three describe a `StepModel`. The worker computes its prompts in order; those that were routed to it before the one before is done
    are computed together, so that the fixed time of a step is not paid for each. It began the first of `length` prompts at
    `since_ns`. `queue` has a row for each: when it was routed to the worker, and its uncached tokens. `age_ms` ago it was not done, or the report of that would be here: until then, a prediction that says otherwise was wrong.
    Only `ASSUMED` of that time is assumed to have been used.
    """
    prompts = computed = together = 0
    began_ms = done_ms = (since_ns - now_ns) / 1e6
    for at in range(length):
        if at and (queue[at][0] - now_ns) / 1e6 > done_ms:
            began_ms = done_ms = (queue[at][0] - now_ns) / 1e6
            together = 0
        together += queue[at][1]
        took_ms = pace * predict_ms(lengths, times, classes, together)
        if at == 0:
            began_ms = done_ms = max(began_ms, -ASSUMED * age_ms - took_ms)
        if began_ms + took_ms >= 0.0:
            return Computed(prompts, computed, max(0.0, -done_ms))
        done_ms = began_ms + took_ms
        prompts += 1
        computed += queue[at][1]
    return Computed(prompts, computed, 0.0)


@jitable
def estimate_times(
    lengths: Any,
    times: Any,
    classes: int,
    longer: float,
    pace: float,
    block_size: int,
    uncached: int,
    queued: int,
    computed_ms: float,
) -> Times:
    """Times for a prompt with `uncached` tokens to compute, after `queued` tokens of earlier prompts.

    `computed_ms` has already been spent on the first of those. The first three describe a `StepModel`; `longer` is its `longer_ms`.
    """
    own = pace * predict_ms(lengths, times, classes, uncached)
    queue = 0.0
    if queued:
        # Queued prompts are computed together: the fixed time of a step is not paid for each.
        queue = max(0.0, pace * predict_ms(lengths, times, classes, queued + uncached) - own - computed_ms)
    return Times(queue, own, pace * longer / (BLOCK_TO - BLOCK_FROM) * block_size)
