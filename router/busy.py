"""When a worker has enough to do: limits, and whether it is above one of them. Pure."""

from typing import NamedTuple

from headwater.router.load import Loads, Worker


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
    tokens, blocks = worker.promised(now_ns)
    if limits.prefill_tokens and tokens > limits.prefill_tokens:
        return True
    return bool(limits.kv and worker.total_blocks and blocks > limits.kv * worker.total_blocks)


def busy_lives(loads: Loads, now_ns: int, limits: BusyLimits) -> tuple[str, ...]:
    """The lives that are above a limit, as a query's `exclude` names them; in order."""
    if not any(limits):
        return ()
    return tuple(
        f"{name}.{worker.epoch}"
        for name, worker in sorted(loads.workers.items())
        if busy(worker, now_ns, limits)
    )
