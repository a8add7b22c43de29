"""Which engine serves a request of a pool whose engines an operator has weighted. Pure.

The draw is weighted rendezvous hashing: each engine gets a time from an exponential distribution with its weight as the rate,
seeded by the request and the engine, and the earliest one is drawn. So an engine is drawn in proportion to its weight; the
requests of one session always draw the same; a change of weights moves only the sessions that it has to move; and where
no worker of the drawn engine may take the request, the order of the others is fixed too.

A request for a given worker or engine draws none, nor does a decode leg: its prefill leg has drawn. Nor do images for encode
workers: what the serving worker can read decides.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from hashlib import blake2b

from headwater.router.decision.filters import explain_no_worker
from headwater.router.fold.load import Loads
from headwater.router.fold.worker import Worker
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import EngineDraw


def find_invalid_weight(weights: Mapping[str, float], workers: Sequence[Worker]) -> str:
    """Why an operator's weights cannot be set for these workers, or ""."""
    engines = {worker.engine: False for worker in workers}
    for worker in workers:
        engines[worker.engine] |= worker.takes_requests
    for engine, weight in sorted(weights.items()):
        if engine not in engines:
            present = ", ".join(sorted(engines)) or "none"
            return f"no worker of this pool runs engine {engine!r}; its engines are: {present}"
        if not (math.isfinite(weight) and weight >= 0):
            return f"the weight of {engine} is {weight:g}: it must be a finite number, and not negative"
    positive = sorted(engine for engine, weight in weights.items() if weight > 0)
    if not positive:
        return "every weight is 0, so no engine would get a request: give one of them a greater weight"
    if not any(engines[engine] for engine in positive):
        return (
            f"no worker of {' or '.join(positive)} takes requests (draining, paused or asleep), "
            "so no request could be served"
        )
    return ""


def weights_for(loads: Loads, wanted: Constraints) -> Mapping[str, float]:
    """The weights by which a request draws its engine; empty where it draws none."""
    is_image = "encode" in wanted.needs and wanted.pairs_with
    drawn = wanted.pinned or wanted.engine or wanted.leg == "decode" or is_image
    return {} if drawn else loads.engine_weights


def weighted_workers(loads: Loads, wanted: Constraints) -> list[Worker]:
    """The workers, by name, without those whose engine may get no new request."""
    weights = weights_for(loads, wanted)
    workers = [worker for _, worker in sorted(loads.workers.items())]
    return [one for one in workers if weights.get(one.engine, 0.0) > 0] if weights else workers


def order_engines(weights: Mapping[str, float], key: str) -> list[str]:
    """Engines with a weight above 0: the one that `key` draws, then the others in the order in which they replace it."""
    return sorted(
        (engine for engine, weight in weights.items() if weight > 0),
        key=lambda engine: (_arrival(engine, key) / weights[engine], engine),
    )


def _arrival(engine: str, key: str) -> float:
    """A draw from the exponential distribution of rate 1."""
    digest = blake2b(engine.encode(), key=blake2b(key.encode()).digest(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "little") + 0.5) / 2**64)


def draw_engine(
    loads: Loads, wanted: Constraints, session: str, seed: int, capable: Callable[[], Set[str]]
) -> EngineDraw | None:
    """The draw for a request whose candidates run the engines `capable`, one at least; None where it draws none.

    The session decides, or else the seed.
    """
    weights = weights_for(loads, wanted)
    if not weights:
        return None
    order = order_engines(weights, f"session {session}" if session else f"seed {seed}")
    engines = capable()
    used = next(engine for engine in order if engine in engines)
    recorded = tuple(sorted(weights.items()))
    if used == order[0]:
        return EngineDraw(recorded, used, used)
    return EngineDraw(recorded, order[0], used, _explain_passed_over(loads, wanted, order[0]))


def _explain_passed_over(loads: Loads, wanted: Constraints, engine: str) -> str:
    workers = [worker for _, worker in sorted(loads.workers.items()) if worker.engine == engine]
    return explain_no_worker(workers, wanted) if workers else f"no worker of {engine} is in the pool"


def explain_weights(loads: Loads, wanted: Constraints) -> str:
    """Why no worker is left of a pool that has some: the weights name none of its engines."""
    shares = ", ".join(
        f"{engine}={weight:g}" for engine, weight in sorted(weights_for(loads, wanted).items())
    )
    return f"none of the {len(loads.workers)} workers runs an engine with a weight above 0 ({shares})"
