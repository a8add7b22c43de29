"""Pulled prefixes on virtual time: a request waits at its worker while blocks of its prompt come from another one.

Only the request waits, while the worker computes others. Blocks are reserved at the target and pinned at the source for that
time. What the source has lost when the pull would begin, or the target has no room for, is computed as without a pull.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headwater.ops.whatif.fleet.pull import LinkQueue, PullLink, choose_pull
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.workers import SimulatedRequest, SimWorker
from headwater.schemas.events.route import PrefixPull
from headwater.schemas.tables.capability import PREFIX_PULL, Capability


class ActivePull(NamedTuple):
    """A pull that has begun."""

    pull: PrefixPull
    job: SimulatedRequest
    source: SimWorker
    target: SimWorker
    began_ns: int
    end_ns: int


class Pulls:
    """See the module. Counts pulls and blocks, and the pulls `refused` because of the source's state or the target's room."""

    def __init__(self, setup: Setup, workers: Mapping[str, SimWorker]) -> None:
        self.count = self.blocks = self.refused = 0
        self._workers = workers
        self._chosen_by_router = setup.pull_gb_per_s > 0 and setup.pull_choice == "router"
        self._size = setup.block_size
        self._links = LinkQueue(
            PullLink(setup.pull_gb_per_s, setup.pull_latency_ms, setup.block_size * setup.kv_bytes_per_token)
        )

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """What workers announce further if routers are to decide on pulls. Other workers that announce nothing can do everything else."""
        return ("generate", "handoff", "kv_events", PREFIX_PULL) if self._chosen_by_router else ()

    def choose(
        self, job: SimulatedRequest, target: SimWorker, held: Mapping[str, tuple[int, int]], now_ns: int
    ) -> PrefixPull | None:
        """The rule of this simulation: pull if the prefix is estimated to arrive before the target would have computed it."""
        name, shape = target.shape.name, target.shape
        speed = shape.speed.at(now_ns)

        def compute_ns(first: int, end: int) -> int:
            without, after = (job.prompt_tokens - depth * self._size for depth in (first, end))
            seconds = shape.step_time.seconds(without, 0.0, False) - shape.step_time.seconds(
                after, 0.0, False
            )
            return round(seconds / speed * 1e9)

        def pull_ns(source: str, blocks: int) -> int:
            return self._links.end_ns(source, name, blocks, now_ns) - now_ns

        return choose_pull(
            held, name, (job.prompt_tokens - 1) // self._size, pull_ns=pull_ns, compute_ns=compute_ns
        )

    def begin(
        self, pull: PrefixPull, job: SimulatedRequest, target: SimWorker, now_ns: int
    ) -> ActivePull | None:
        """Begin a pull; None if its source no longer has the blocks, or its target has no room for them."""
        source = self._workers[pull.source]
        blocks = job.hashes[pull.first : pull.end]
        if source.epoch != pull.epoch or not source.pin(blocks):
            self.refused += 1
            return None
        if not target.reserve(job, pull.first, pull.end):
            source.unpin(blocks)
            self.refused += 1
            return None
        self.count += 1
        self.blocks += pull.blocks
        end_ns = self._links.occupy(pull.source, target.shape.name, pull.blocks, now_ns)
        return ActivePull(pull, job, source, target, now_ns, end_ns)

    def end(self, active: ActivePull, now_ns: int) -> bool:
        """The blocks have arrived, and the request joins the others. True: its worker's steps now end earlier than scheduled."""
        pull = active.pull
        active.source.unpin(active.job.hashes[pull.first : pull.end])
        active.target.add_pull(pull.blocks * self._size, now_ns - active.began_ns)
        return active.target.receive(active.job, pull.first, pull.end, now_ns)
