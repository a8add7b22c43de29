"""Pickers: each policy chooses one of the scored candidates. Pure; random draws come from the recorded seed.

kv             the lowest cost (with a temperature, a draw weighted by cost)
round_robin    in turn, by worker name
random         uniformly at random
power_of_two   the less loaded of two drawn at random
least_loaded   the least loaded for its size
session        session affinity: always the same worker for a session, with bounded load
direct         the worker that the request names
"""

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, NamedTuple

from headwater.router.decision import cost
from headwater.router.decision.candidates import Candidates
from headwater.router.decision.context import ScoringContext
from headwater.schemas.events.route import Candidate

SESSION_SHARE_MAX: Final = 1.25
"""A session spills to its next worker while the first has more than so many times the mean number of requests …"""

SESSION_SLACK: Final = 2
"""… plus this many."""


class Choice(NamedTuple):
    """What a policy picks from: `candidates` in order of worker name, and the request's `seed`.

    A candidate is built when it is asked for; policies for large fleets read the arrays of `Candidates`.
    """

    scoring: ScoringContext
    candidates: Candidates
    seed: int


class PolicyError(ValueError):
    """The request lacks what the policy needs."""


Policy = Callable[[Choice], Candidate]


def pick_lowest_cost(choice: Choice) -> Candidate:
    """The lowest cost; ties are drawn. At temperature T, a candidate with (1 + T) times the lowest cost is e times less likely."""
    candidates, temperature = choice.candidates, choice.scoring.preferences.temperature
    scores = candidates.scores
    best = float(scores.min())
    if temperature <= 0:
        ties = (scores == best).nonzero()[0]
        return candidates[int(ties[choice.seed % len(ties)])]
    scale = temperature * max(abs(best), 1e-9)
    # Not numpy's `exp` and not `sum`: both give other last bits on other processors or in other versions of Python.
    shares = [math.exp((best - score) / scale) for score in scores.tolist()]
    total = 0.0
    for share in shares:
        total += share
    left = choice.seed / 2**64 * total
    for at, share in enumerate(shares):
        left -= share
        if left < 0:
            return candidates[at]
    return candidates[-1]


def pick_round_robin(choice: Choice) -> Candidate:
    """In turn, by the router's count of decisions: each router counts its own."""
    return choice.candidates[choice.scoring.context.number % len(choice.candidates)]


def pick_random(choice: Choice) -> Candidate:
    """Uniformly at random."""
    return choice.candidates[choice.seed % len(choice.candidates)]


def pick_power_of_two(choice: Choice) -> Candidate:
    """Draw two different candidates and take the less loaded."""
    candidates = choice.candidates
    if len(candidates) == 1:
        return candidates[0]
    first = choice.seed % len(candidates)
    second = (first + 1 + (choice.seed >> 32) % (len(candidates) - 1)) % len(candidates)
    return min(candidates[first], candidates[second], key=lambda candidate: load_of(choice, candidate))


def pick_least_loaded(choice: Choice) -> Candidate:
    """The least loaded; ties are drawn."""
    candidates = choice.candidates
    table = choice.scoring.loads.columns.table[candidates.rows]
    tokens, blocks = candidates.quantity(cost.TOKENS), candidates.quantity(cost.BLOCKS)
    loads = (blocks + tokens / table["block_size"]) / table["total_blocks"]
    ties = (loads == loads.min()).nonzero()[0]
    return candidates[int(ties[choice.seed % len(ties)])]


def pick_by_session(choice: Choice) -> Candidate:
    """Session affinity by rendezvous hashing, with bounded load: a worker above 1.25× the mean (plus slack) spills to the next.

    A worker that joins or leaves moves only its own sessions. Requests without a session go to the lowest cost.
    """
    session = choice.scoring.preferences.session
    if not session:
        return pick_lowest_cost(choice)
    candidates = choice.candidates
    requests = candidates.quantity(cost.REQUESTS)
    mean = int(requests.sum()) / len(candidates)
    bound = SESSION_SHARE_MAX * mean + SESSION_SLACK
    ranked = sorted(
        range(len(candidates)), key=lambda at: _rank(session, candidates.worker_of(at).name), reverse=True
    )
    return candidates[next((at for at in ranked if requests[at] <= bound), ranked[0])]


def pick_pinned(choice: Choice) -> Candidate:
    """The worker that the request names; candidates were restricted to it."""
    if not choice.scoring.constraints.pinned:
        raise PolicyError("policy direct: the request names no worker")
    return choice.candidates[0]


def load_of(choice: Choice, candidate: Candidate) -> float:
    """A worker's load as a share of its capacity: blocks in use and blocks to compute."""
    worker = choice.scoring.loads.workers[candidate.worker]
    return (candidate.decode_blocks + candidate.prefill_tokens / worker.block_size) / worker.total_blocks


def _rank(session: str, worker: str) -> bytes:
    return blake2b(worker.encode(), key=session.encode()[:64], digest_size=8).digest()


POLICIES: Final[dict[str, Policy]] = {
    "kv": pick_lowest_cost,
    "round_robin": pick_round_robin,
    "random": pick_random,
    "power_of_two": pick_power_of_two,
    "least_loaded": pick_least_loaded,
    "session": pick_by_session,
    "direct": pick_pinned,
}
