"""When a snapshot is due: by the time that folding its tail would take, by age, and by what it costs."""

from typing import NamedTuple


class Policy(NamedTuple):
    """Bounds; each alone makes a snapshot due. Seconds are of the actor's clock.

    `fold_s`: what a restart may spend on folding the tail. `records`: messages in the tail, for a log that is
    slow to read rather than to fold. `age_s`: with any change at all. `share`: at most this part of the time
    is spent on taking snapshots, so that a large state is not written without end.
    """

    fold_s: float = 1.0
    records: int = 20_000
    age_s: float = 30.0
    share: float = 0.05


class Tail(NamedTuple):
    """What happened since the last snapshot (or since the start): how much was folded, how long that took.

    `cost_s`: what taking the last snapshot took, 0 for none so far.
    """

    records: int
    fold_s: float
    age_s: float
    cost_s: float = 0.0


def due(policy: Policy, tail: Tail) -> bool:
    """Should a snapshot be taken now?"""
    if tail.records <= 0 or tail.age_s < tail.cost_s / policy.share:
        return False
    return tail.fold_s >= policy.fold_s or tail.records >= policy.records or tail.age_s >= policy.age_s
