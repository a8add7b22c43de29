"""When a worker has enough to do: limits, and whether it is above one of them. Pure."""

from typing import Final, NamedTuple

from headwater.router.load import Loads
from headwater.router.worker import Worker

UNACCEPTED_NS_MAX: Final = 5_000_000_000
"""Beyond this a decision that its worker did not accept keeps nobody waiting: its answer got lost, or its edge died.
Far beyond the time in which a worker says that it has a request; it goes on to count where costs are compared."""


class BusyLimits(NamedTuple):
    """A worker above any of these is given nothing that can wait or go elsewhere. 0: no such limit.

    `prefill_tokens` are prompt tokens promised to it and not computed yet, `kv` the share of its KV blocks that its
    requests hold (blocks that they share count for each), `waiting` the requests that its engine itself has queued.
    """

    prefill_tokens: int = 0
    kv: float = 0.0
    waiting: int = 0


def busy(worker: Worker, now_ns: int, limits: BusyLimits) -> bool:
    """Is the worker above a limit?"""
    if limits.waiting and worker.waiting > limits.waiting:
        return True
    most_tokens, most_blocks = limits.prefill_tokens, limits.kv * worker.total_blocks
    if not _above(worker.prefill_tokens, most_tokens) and not _above(worker.decode_blocks, most_blocks):
        # Most are not, and what is promised is never more than these.
        return False
    tokens, blocks = worker.promised_within(now_ns, UNACCEPTED_NS_MAX)
    return _above(tokens, most_tokens) or _above(blocks, most_blocks)


def _above(much: int, most: float) -> bool:
    return bool(most) and much > most


def busy_lives(loads: Loads, now_ns: int, limits: BusyLimits) -> tuple[str, ...]:
    """The lives that are above a limit, as a query's `exclude` names them; in order."""
    if not any(limits):
        return ()
    found = [worker for worker in loads.workers.values() if busy(worker, now_ns, limits)]
    return tuple(sorted(f"{worker.name}.{worker.epoch}" for worker in found))
