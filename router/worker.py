"""One worker as the log describes it: its properties, its in-flight requests, and its prefill times.

Engines announce a block once it is computed, so the next request of a conversation, or of a burst, would find nothing. A
decision therefore lists a sample of its prompt's hashes (`sample_positions`), which the router credits to the worker. A
hash names its whole prefix, so a few along the prompt suffice. The credit is dropped when the request ends; by
then the engine has announced its blocks.

Workers whose engines publish no KV events keep the credit of their latest prompts: as many as fit into the cache, and none much
older than the newest, which approximates the engine's LRU cache.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from headwater.router.estimates import DecodeModel
from headwater.schemas.events import Role, WorkerState
from headwater.schemas.hashing import unpack_hashes

SAMPLE_MAX = 32
"""A prompt's sample has about this many hashes."""

AGE_NS_MAX = 600_000_000_000
"""Without KV events, prompts routed this long before a worker's newest one are dropped."""


def sample_positions(first: int, blocks: int) -> list[int]:
    """Return which of a prompt's blocks `first` to `blocks` - 1 are sampled: the first, the last, and an even grid.

    The grid has a power of two as its step and starts at the beginning of the prompt, so long and short prompts share points.
    """
    if first >= blocks:
        return []
    step = 1
    while (blocks - first) // step > SAMPLE_MAX:
        step *= 2
    grid = range(first + (-(first + 1)) % step, blocks, step)
    return sorted({first, *grid, blocks - 1})


class RoutedPrompt(msgspec.Struct):
    """A prompt routed to a worker without KV events: `blocks` of it were new there."""

    decided_ns: int
    blocks: int
    hashes: bytes


class ExpectedBlocks(msgspec.Struct):
    """Prompts that a worker without KV events is expected to hold; together they take `blocks` blocks."""

    prompts: dict[str, RoutedPrompt] = {}
    order: list[tuple[int, str]] = []
    blocks: int = 0
    evicted: tuple[int, str] = (-1, "")
    """The newest evicted prompt. Older ones are evicted too, in whatever order prompts are added."""

    def add(self, request: str, prompt: RoutedPrompt, room: int) -> list[RoutedPrompt]:
        """Add a prompt; returns the evicted ones. The result does not depend on the order of additions."""
        if (prompt.decided_ns, request) < self.evicted:
            return [prompt]
        self.prompts[request] = prompt
        insort(self.order, (prompt.decided_ns, request))
        self.blocks += prompt.blocks
        evicted: list[RoutedPrompt] = []
        while len(self.order) > 1 and (
            self.blocks > room or self.order[0][0] < self.order[-1][0] - AGE_NS_MAX
        ):
            self.evicted = self.order.pop(0)
            evicted.append(self._take(self.evicted[1]))
        return evicted

    def remove(self, request: str) -> RoutedPrompt | None:
        """Remove a prompt that did not reach its worker; returns it."""
        prompt = self.prompts.get(request)
        if prompt is None:
            return None
        del self.order[bisect_left(self.order, (prompt.decided_ns, request))]
        return self._take(request)

    def _take(self, request: str) -> RoutedPrompt:
        prompt = self.prompts.pop(request)
        self.blocks -= prompt.blocks
        return prompt


class Credit(msgspec.Struct):
    """`holders[hash][worker]`: how many prompts credit the worker with the block and all before it."""

    holders: dict[int, dict[str, int]] = {}

    def add(self, worker: str, hashes: bytes) -> None:
        """Credit `worker` with a prompt's packed hashes."""
        for block in unpack_hashes(hashes).tolist():
            counts = self.holders.setdefault(block, {})
            counts[worker] = counts.get(worker, 0) + 1

    def drop(self, worker: str, hashes: bytes) -> None:
        """Drop that credit."""
        for block in unpack_hashes(hashes).tolist():
            counts = self.holders.get(block, {})
            remaining = counts.get(worker, 0) - 1
            if remaining > 0:
                counts[worker] = remaining
            else:
                counts.pop(worker, None)
                if not counts:
                    self.holders.pop(block, None)

    def depths(self, positions: list[int], hashes: list[int]) -> dict[str, int]:
        """The number of leading blocks credited to each worker, from blocks' ascending positions and their hashes."""
        depths: dict[str, int] = {}
        for position, block in zip(positions, hashes, strict=True):
            holders = self.holders.get(block)
            if holders:
                for worker in holders:
                    depths[worker] = position + 1
        return depths


class NoCredit(Credit):
    """The credit of a fold on which no decision is made: counting it is a tenth of the work."""

    def add(self, worker: str, hashes: bytes) -> None:
        """Nothing."""

    def drop(self, worker: str, hashes: bytes) -> None:
        """Nothing."""


# The worker.

DECIDED, ACCEPTED, PREFILLED, FINISHED = range(4)

UNACCEPTED_NS_MAX = 30_000_000_000
"""A decision that its worker has not accepted within this time (its edge died) stops counting."""

SWAPPED_NS_MAX = 2_000_000_000
"""Decisions of several routers may be stored out of the order in which they were made, by no more than this."""

AGE_MS_MAX = 2_000.0
"""A load report counts as at most this old: the rest is a clock that is wrong, or an outage that is over."""

AGE_MEMORY = 8
"""How many load reports `signal_age_ms` is a mean of."""

QUEUE_MAX = 16
"""Prompts of a queue that a decision looks at one by one. `AGE_MS_MAX` of work is seldom more."""


class Active(msgspec.Struct):
    """One request routed to a worker. `uncached_tokens` count until its prompt is computed, `assumed` until it ends."""

    uncached_tokens: int
    blocks: int
    decided_ns: int
    stage: int = DECIDED
    assumed: bytes = b""


class Traits(NamedTuple):
    """What constraints can ask of a worker. Workers with equal traits may take the same requests.

    Of a whole fleet there are few different ones, so filters test those instead of every worker.
    """

    engine: str
    role: Role
    state: WorkerState
    draining: bool
    capabilities: tuple[str, ...]
    pairs_with: str
    tier: str
    taints: tuple[str, ...]
    loras: tuple[str, ...]
    lora_slots: int
    tokenizer: str
    media_processor: str
    revision: str

    @property
    def serves_whole(self) -> bool:
        """Can it both prefill and decode a request?"""
        return "split_only" not in self.capabilities

    @property
    def takes_requests(self) -> bool:
        """May new requests be routed to it?"""
        return self.state == "ready" and not self.draining


def state_of(worker: "Worker | Traits") -> WorkerState:
    """Its state for people, in which draining shows however it was announced."""
    return "draining" if worker.draining and worker.state == "ready" else worker.state


def step_kind(engine: str, role: Role) -> str:
    """Workers of one kind have the same step times: those of an engine, and apart from them those that encode images with it."""
    return f"{engine} encoder" if role == "encode" else engine


class Worker(msgspec.Struct):
    """One worker of the pool in its present epoch."""

    name: str
    epoch: int
    engine: str
    role: Role
    block_size: int
    total_blocks: int
    max_running: int
    draining: bool = False
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: dict[str, Active] = {}
    unaccepted: dict[str, None] = {}
    computing: dict[str, None] = {}
    state: WorkerState = "ready"
    loras: tuple[str, ...] = ()
    lora_slots: int = 0
    capabilities: tuple[str, ...] = ()
    pairs_with: str = ""
    instance: str = ""
    tier: str = ""
    taints: tuple[str, ...] = ()
    pace: float = 1.0
    """Its prefill times divided by those of the `StepModel` of its kind."""
    step_ms: float = 0.0
    reported_ns: int = 0
    expected: ExpectedBlocks = msgspec.field(default_factory=ExpectedBlocks)
    rejoined: int = 0
    """Log position at which this epoch rejoined after it had left; 0 if it never left."""
    tokenizer: str = ""
    decode_model: DecodeModel = msgspec.field(default_factory=DecodeModel)
    """What its decode steps take."""
    outliers: int = 0
    """How many of its latest prefill times in a row were far above its pace; negative: below."""
    signal_age_ms: float = 0.0
    """How long after the time on its own clock the log has stored its load reports: a mean over the latest ones."""
    media_processor: str = ""
    revision: str = ""

    @property
    def announces(self) -> bool:
        """Does its engine publish KV events? Workers that published no capabilities do."""
        return not self.capabilities or "kv_events" in self.capabilities

    @property
    def traits(self) -> Traits:
        """What constraints can ask of it."""
        return Traits(*[getattr(self, name) for name in Traits._fields])

    @property
    def serves_whole(self) -> bool:
        """Can it both prefill and decode a request?"""
        return self.traits.serves_whole

    @property
    def step_kind(self) -> str:
        """See `step_kind`."""
        return step_kind(self.engine, self.role)

    @property
    def takes_requests(self) -> bool:
        """May new requests be routed to it?"""
        return self.state == "ready" and not self.draining

    def promised(self, now_ns: int) -> tuple[int, int]:
        """(prompt tokens to compute, blocks held) of the requests routed to this worker.

        Requests that it should have accepted long ago do not count. They are left out here and not removed: the
        state must not depend on whether a report or a decision was folded first.
        """
        return self.promised_within(now_ns, UNACCEPTED_NS_MAX)

    def promised_within(self, now_ns: int, unaccepted_ns_max: int) -> tuple[int, int]:
        """`promised`, without requests that were unaccepted for longer than this."""
        tokens, blocks = self.prefill_tokens, self.decode_blocks
        for request in self._given_up(now_ns, unaccepted_ns_max):
            active = self.requests[request]
            tokens -= active.uncached_tokens
            blocks -= active.blocks
        return tokens, blocks

    def _given_up(self, now_ns: int, unaccepted_ns_max: int = UNACCEPTED_NS_MAX) -> Iterator[str]:
        """Requests that were unaccepted for longer than this."""
        for request in self.unaccepted:
            age_ns = now_ns - self.requests[request].decided_ns
            if age_ns > unaccepted_ns_max:
                yield request
            elif age_ns < unaccepted_ns_max - SWAPPED_NS_MAX:
                # They are nearly in the order of their decisions: the rest is younger.
                return

    def queued_prompts(self, now_ns: int) -> int:
        """Return how many prompts are routed to it and not computed, of the requests that `promised` counts."""
        return len(self.computing) - sum(request in self.computing for request in self._given_up(now_ns))

    def computing_since(self, now_ns: int) -> tuple[int, int]:
        """(when it began the prompt it is computing, that prompt's uncached tokens), estimated from decisions and reports.

        (`now_ns`, 0) if it is computing none.
        """
        for request in self.computing:
            active = self.requests[request]
            if active.stage != DECIDED or now_ns - active.decided_ns <= UNACCEPTED_NS_MAX:
                return max(active.decided_ns, self.reported_ns), active.uncached_tokens
        return now_ns, 0

    def list_queue(self, now_ns: int) -> list[tuple[int, int]]:
        """(time of the decision, uncached tokens) of the `QUEUE_MAX` oldest prompts that are not computed, of those that `promised` counts."""
        given_up = set(self._given_up(now_ns))
        counted = islice((request for request in self.computing if request not in given_up), QUEUE_MAX)
        queue = [self.requests[request] for request in counted]
        return [(active.decided_ns, active.uncached_tokens) for active in queue]

    def observe_age(self, age_ns: int) -> None:
        """A load report was stored `age_ns` after the time that it has. Clocks may differ: it may be negative."""
        age_ms = min(max(0.0, age_ns / 1e6), AGE_MS_MAX)
        self.signal_age_ms += (age_ms - self.signal_age_ms) / (AGE_MEMORY if self.signal_age_ms else 1)
