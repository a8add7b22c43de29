"""A prefix that a worker pulls from another one instead of computing it: what it takes, and when it is worthwhile."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headwater.schemas.events.route import PrefixPull


class PullLink(NamedTuple):
    """What a pull takes: a latency, and its bytes over a rate."""

    gb_per_s: float
    latency_ms: float
    block_bytes: int

    def transfer_ns(self, blocks: int) -> int:
        """The time of a pull of so many blocks on an idle link."""
        return round(self.latency_ms * 1e6 + blocks * self.block_bytes / self.gb_per_s)


class LinkQueue:
    """Links of all workers, one in each direction. A pull needs one of its source and one of its target, first come first served."""

    def __init__(self, link: PullLink) -> None:
        self._link = link
        self._free_ns: dict[tuple[str, str], int] = {}

    def end_ns(self, source: str, target: str, blocks: int, now_ns: int) -> int:
        """When a pull that is asked for now would end."""
        out_ns, in_ns = self._free_ns.get((source, "out"), 0), self._free_ns.get((target, "in"), 0)
        return max(now_ns, out_ns, in_ns) + self._link.transfer_ns(blocks)

    def occupy(self, source: str, target: str, blocks: int, now_ns: int) -> int:
        """Begin a pull. Returns its end."""
        end_ns = self.end_ns(source, target, blocks, now_ns)
        self._free_ns[source, "out"] = self._free_ns[target, "in"] = end_ns
        return end_ns


def choose_pull(
    held: Mapping[str, tuple[int, int]],
    target: str,
    usable: int,
    *,
    pull_ns: Callable[[str, int], int],
    compute_ns: Callable[[int, int], int],
) -> PrefixPull | None:
    """The pull that is done sooner than the target computes the same blocks; None if no worker has more blocks, or none is quicker.

    `held`: (leading blocks of the prompt, epoch) of each worker. Of the prompt `usable` blocks can be reused.
    `pull_ns(source, blocks)` and `compute_ns(first, end)` estimate. The source is a worker with the longest prefix, of these
    the one that delivers first.
    """
    first = min(held.get(target, (0, 0))[0], usable)
    end = min(max((depth for depth, _ in held.values()), default=0), usable)
    if end <= first:
        return None
    sources = [name for name, (depth, _) in held.items() if depth >= end]
    source = min(sources, key=lambda name: (pull_ns(name, end - first), name))
    if pull_ns(source, end - first) >= compute_ns(first, end):
        return None
    return PrefixPull(source, held[source][1], first, end)
