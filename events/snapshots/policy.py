"""When a snapshot is due: by the time to fold the tail after it, by age, and by the cost of taking one."""

from typing import NamedTuple


class Policy(NamedTuple):
    """Bounds; each alone makes a snapshot due. Seconds are of the actor's clock.

    `fold_s`: how long a restart may take to fold the tail. `records`: messages in the tail, for a log that is
    slow to read rather than to fold. `age_s`: age of the newest snapshot, if anything changed since. `share`: at most
    this fraction of the time is spent on taking snapshots, so that a large state is not written continuously.
    """

    fold_s: float = 1.0
    records: int = 20_000
    age_s: float = 30.0
    share: float = 0.05


class Tail(NamedTuple):
    """What was folded since the last snapshot (or since the start), and how long that took.

    `cost_s`: duration of taking the last snapshot, 0 without one.
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
