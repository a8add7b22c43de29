"""Saturation detector: which workers are above a limit. Pure."""

from typing import Final

import numpy as np

from headwater.router.fold.load import Loads
from headwater.router.fold.worker import Worker
from headwater.router.queue.limits import BusyLimits

UNACCEPTED_NS_MAX: Final = 5_000_000_000
"""A decision that its worker has not accepted for this long no longer saturates it: its answer was lost, or its edge died.
Workers accept within a fraction of this. Cost comparisons count the decision longer (`router.fold.worker`)."""


def is_saturated(worker: Worker, now_ns: int, limits: BusyLimits) -> bool:
    """Is the worker above a limit?"""
    if limits.waiting and worker.waiting > limits.waiting:
        return True
    most_tokens, most_blocks = limits.prefill_tokens, limits.kv * worker.total_blocks
    if not _above(worker.prefill_tokens, most_tokens) and not _above(worker.decode_blocks, most_blocks):
        # The common case: the sums below are never larger than these.
        return False
    tokens, blocks = worker.promised_within(now_ns, UNACCEPTED_NS_MAX)
    return _above(tokens, most_tokens) or _above(blocks, most_blocks)


def _above(amount: int, limit: float) -> bool:
    return bool(limit) and amount > limit


def saturated_workers(loads: Loads, now_ns: int, limits: BusyLimits) -> tuple[str, ...]:
    """The saturated incarnations, sorted, as `Constraints.exclude` lists them."""
    if not any(limits):
        return ()
    columns = loads.columns
    columns.refresh()
    table = columns.table
    # The sums of some requests are never larger than those of all, so this leaves out no saturated worker.
    above = np.zeros(len(table), np.bool_)
    if limits.waiting:
        above |= table["waiting"] > limits.waiting
    if limits.prefill_tokens:
        above |= table["prefill_tokens"] > limits.prefill_tokens
    if limits.kv:
        above |= table["decode_blocks"] > limits.kv * table["total_blocks"]
    suspects = [columns.workers[row] for row in above.nonzero()[0].tolist()]
    found = [worker for worker in suspects if is_saturated(worker, now_ns, limits)]
    return tuple(sorted(f"{worker.name}.{worker.epoch}" for worker in found))
