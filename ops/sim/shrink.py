"""Reduction of a failing run to the fewest faults with which it still fails."""

from collections.abc import Callable, Sequence

from headwater.ops.sim.faults import Fault

RUNS_MAX = 200


def shrink(faults: Sequence[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """Delta debugging: remove halves, then smaller parts, then single faults, as long as the rest still fails.

    `fails` is called at most `RUNS_MAX` times. The result fails if `faults` does, and none of its faults can be
    removed alone.
    """
    left = list(faults)
    parts = 2
    runs = 0
    while left and runs < RUNS_MAX:
        size = -(-len(left) // parts)
        smaller = None
        for start in range(0, len(left), size):
            candidate = left[:start] + left[start + size :]
            runs += 1
            if fails(candidate):
                smaller = candidate
                break
            if runs >= RUNS_MAX:
                return left
        if smaller is not None:
            left, parts = smaller, max(2, parts - 1)
        elif size == 1:
            return left
        else:
            parts = min(len(left), 2 * parts)
    return left
