"""Policies: each picks one of the candidates that cost and filters left. Pure; chance comes from the recorded seed.

kv             the least cost: what is cached, computed, queued and held counts (with a temperature: likely the least)
round_robin    one after the other, by name
random         any
power_of_two   of two drawn ones the one with less to do
least_loaded   the one with the least to do for its size
session        always the same worker for a session, unless that has far more to do than the others
direct         the worker that the request names, or none
"""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from headwater.router.candidates import Scene
from headwater.schemas.route import Candidate

SESSION_SHARE_MAX = 1.25
"""A session's worker is passed over while it has more than so many times the mean number of requests …"""

SESSION_SLACK = 2
"""… and this many more."""


class Choice(NamedTuple):
    """What a policy picks from. `candidates` are in the order of their names; `seed` is the request's."""

    scene: Scene
    candidates: Sequence[Candidate]
    seed: int


class CannotChoose(ValueError):
    """The policy needs something that the request does not say."""


Policy = Callable[[Choice], Candidate]


def least_cost(choice: Choice) -> Candidate:
    """The least cost; equal ones are drawn. With a temperature T, one that costs (1 + T) times as much is e times less likely."""
    candidates, temperature = choice.candidates, choice.scene.standing.temperature
    best = min(candidate.score for candidate in candidates)
    if temperature <= 0:
        ties = [candidate for candidate in candidates if candidate.score == best]
        return ties[choice.seed % len(ties)]
    scale = temperature * max(abs(best), 1e-9)
    shares = [math.exp((best - candidate.score) / scale) for candidate in candidates]
    left = choice.seed / 2**64 * sum(shares)
    for candidate, share in zip(candidates, shares, strict=True):
        left -= share
        if left < 0:
            return candidate
    return candidates[-1]


def round_robin(choice: Choice) -> Candidate:
    """By the router's count of decisions: each router goes round on its own."""
    return choice.candidates[choice.scene.standing.number % len(choice.candidates)]


def at_random(choice: Choice) -> Candidate:
    """Any, alike likely."""
    return choice.candidates[choice.seed % len(choice.candidates)]


def power_of_two(choice: Choice) -> Candidate:
    """Two different ones are drawn; the less loaded is taken."""
    candidates = choice.candidates
    if len(candidates) == 1:
        return candidates[0]
    first = choice.seed % len(candidates)
    second = (first + 1 + (choice.seed >> 32) % (len(candidates) - 1)) % len(candidates)
    return min(candidates[first], candidates[second], key=lambda candidate: load_of(choice, candidate))


def least_loaded(choice: Choice) -> Candidate:
    """The least loaded; equal ones are drawn."""
    loads = [load_of(choice, candidate) for candidate in choice.candidates]
    ties = [c for c, load in zip(choice.candidates, loads, strict=True) if load == min(loads)]
    return ties[choice.seed % len(ties)]


def session(choice: Choice) -> Candidate:
    """Rendezvous hashing of session and worker: a worker that comes or goes moves only its own sessions.

    It yields to the next in the session's order where the worker has far more requests than the mean. Requests without a session go
    where they cost least.
    """
    key = choice.scene.query.session
    if not key:
        return least_cost(choice)
    candidates = choice.candidates
    mean = sum(candidate.requests for candidate in candidates) / len(candidates)
    bound = SESSION_SHARE_MAX * mean + SESSION_SLACK
    ranked = sorted(candidates, key=lambda candidate: _rank(key, candidate.worker), reverse=True)
    return next((candidate for candidate in ranked if candidate.requests <= bound), ranked[0])


def direct(choice: Choice) -> Candidate:
    """The worker that the request names (the filters left only that)."""
    if not choice.scene.query.pinned:
        raise CannotChoose("policy direct: the request names no worker")
    return choice.candidates[0]


def load_of(choice: Choice, candidate: Candidate) -> float:
    """What a worker has to do, as a share of what it can hold: blocks in use and to be computed."""
    worker = choice.scene.loads.workers[candidate.worker]
    return (candidate.decode_blocks + candidate.prefill_tokens / worker.block_size) / worker.total_blocks


def _rank(key: str, worker: str) -> bytes:
    return blake2b(worker.encode(), key=key.encode()[:64], digest_size=8).digest()


POLICIES: Final[dict[str, Policy]] = {
    "kv": least_cost,
    "round_robin": round_robin,
    "random": at_random,
    "power_of_two": power_of_two,
    "least_loaded": least_loaded,
    "session": session,
    "direct": direct,
}
DEFAULT: Final = "kv"
