"""Pickers: each policy chooses one of the scored candidates. Pure; random draws come from the recorded seed.

kv             the lowest cost (with a temperature, a draw weighted by cost)
slo            the fullest worker that is predicted to meet the limits of a request's latency, or else the lowest cost
lmetric        the lowest product of the tokens to compute and the requests to share the worker with
round_robin    in turn, by worker name
random         uniformly at random
power_of_two   the less loaded of two drawn at random
least_loaded   the least loaded for its size
session        session affinity: always the same worker for a session, with bounded load
direct         the worker that the request names

All arithmetic is elementwise, so that a recomputed decision is the same to the last bit on every machine.
"""

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.router import cost
from headwater.router.candidates import Candidates
from headwater.router.columns import F64, I64
from headwater.router.context import ScoringContext
from headwater.schemas.routing import Candidate, Weights

Flags = NDArray[np.bool_]


def predict_ttft_ms(candidates: Candidates) -> F64:
    """Milliseconds to the first token: queue, prefill and KV transfer. All 0 until the step times of all candidates are known."""
    ttft_ms: F64 = (
        candidates.times(cost.QUEUE_MS)
        + candidates.times(cost.PREFILL_MS)
        + candidates.times(cost.TRANSFER_MS)
    )
    return ttft_ms


def count_uncached(candidates: Candidates, table: NDArray[Any], prompt_tokens: int) -> I64:
    """Tokens of the prompt that each worker would compute; `table` has the candidates' rows."""
    held = candidates.quantity(cost.CACHED) + candidates.quantity(cost.LOWER)
    uncached: I64 = prompt_tokens - held * table["block_size"]
    return uncached


def predict_itl_ms(candidates: Candidates, table: NDArray[Any]) -> F64:
    """Milliseconds between two tokens with this request too; `table` has the candidates' rows.

    What the worker reported last grows with the number of its requests: (n + 1) / n. That is the most it can grow, as a part of each
    step does not depend on how many share it. A worker without requests has no step that this one could slow down.
    """
    requests = candidates.quantity(cost.REQUESTS)
    grown: F64 = table["step_ms"] * (requests + 1) / np.maximum(requests, 1)
    return np.where(requests > 0, grown, 0.0)


def find_meeting(candidates: Candidates, table: NDArray[Any], prompt_tokens: int, limits: Weights) -> Flags:
    """Return which candidates a request may be packed on; none where step times are unknown.

    They meet the limit of the time to the first token, compute no more of the prompt than any other that does, and meet the limit
    between two tokens. A worker that lacks the prefix never counts as better placed because it is less busy: what it would compute again
    delays all who decode there.
    """
    ttft_ms = predict_ttft_ms(candidates)
    in_time = ttft_ms <= limits.ttft_limit_ms
    if not ttft_ms.any() or not in_time.any():
        return np.zeros(len(candidates), np.bool_)
    uncached = count_uncached(candidates, table, prompt_tokens)
    least: Flags = uncached == uncached[in_time].min()
    return in_time & least & (predict_itl_ms(candidates, table) <= limits.itl_limit_ms)


# Pickers.

SESSION_SHARE_MAX: Final = 1.25
"""A session spills to its next worker while the first has more than this many times the mean number of requests …"""

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
    remaining_share = choice.seed / 2**64 * total
    for at, share in enumerate(shares):
        remaining_share -= share
        if remaining_share < 0:
            return candidates[at]
    return candidates[-1]


def pick_within_limits(choice: Choice) -> Candidate:
    """The fullest worker that is predicted to meet the limits (`find_meeting`), so that others stay free; if none is, the lowest cost."""
    candidates, scoring = choice.candidates, choice.scoring
    table = _rows_of(choice)
    meeting = find_meeting(candidates, table, scoring.query.prompt_tokens, scoring.weights)
    if not meeting.any():
        return pick_lowest_cost(choice)
    fullness: F64 = np.where(meeting, measure_loads(choice), -1.0)
    return _draw(choice, fullness == fullness.max())


def pick_lowest_product(choice: Choice) -> Candidate:
    """The lowest product of the prompt's tokens to compute there and the requests that would run there, this one included; ties are drawn.

    LMetric (arXiv 2603.15202), which has no weights. It counts this request, or all idle workers would cost the same.
    """
    candidates = choice.candidates
    uncached = count_uncached(candidates, _rows_of(choice), choice.scoring.query.prompt_tokens)
    products: I64 = uncached * (candidates.quantity(cost.REQUESTS) + 1)
    return _draw(choice, products == products.min())


def pick_round_robin(choice: Choice) -> Candidate:
    """Pick in turn, by the router's count of decisions: each router counts its own."""
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
    loads = measure_loads(choice)
    return _draw(choice, loads == loads.min())


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


def measure_loads(choice: Choice) -> F64:
    """`load_of` every candidate."""
    table = _rows_of(choice)
    tokens, blocks = choice.candidates.quantity(cost.TOKENS), choice.candidates.quantity(cost.BLOCKS)
    loads: F64 = (blocks + tokens / table["block_size"]) / table["total_blocks"]
    return loads


def load_of(choice: Choice, candidate: Candidate) -> float:
    """A worker's load as a share of its capacity: blocks in use and blocks to compute."""
    worker = choice.scoring.loads.workers[candidate.worker]
    return (candidate.decode_blocks + candidate.prefill_tokens / worker.block_size) / worker.total_blocks


def _rows_of(choice: Choice) -> NDArray[Any]:
    """The rows of the candidates in the table of workers."""
    rows: NDArray[Any] = choice.scoring.loads.columns.table[choice.candidates.rows]
    return rows


def _draw(choice: Choice, best: NDArray[np.bool_]) -> Candidate:
    """One of the candidates at which `best` is true."""
    ties = best.nonzero()[0]
    return choice.candidates[int(ties[choice.seed % len(ties)])]


def _rank(session: str, worker: str) -> bytes:
    return blake2b(worker.encode(), key=session.encode()[:64], digest_size=8).digest()


POLICIES: Final[dict[str, Policy]] = {
    "kv": pick_lowest_cost,
    "slo": pick_within_limits,
    "lmetric": pick_lowest_product,
    "round_robin": pick_round_robin,
    "random": pick_random,
    "power_of_two": pick_power_of_two,
    "least_loaded": pick_least_loaded,
    "session": pick_by_session,
    "direct": pick_pinned,
}
