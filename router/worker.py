"""One worker as the log tells it: what it is, what it was given, and how long it takes."""

import msgspec

from headwater.router.assumed import Beliefs
from headwater.router.step_model import StepModel
from headwater.schemas.fleet import Role, WorkerState

DECIDED, ACCEPTED, PREFILLED, FINISHED = range(4)

UNACCEPTED_NS_MAX = 30_000_000_000
"""A decision that its worker did not accept within this time (the edge died in between) stops counting."""

SWAPPED_NS_MAX = 2_000_000_000
"""Decisions of several routers may come in another order than they were made in, by no more than this."""


class Active(msgspec.Struct):
    """One request given to a worker. `uncached_tokens` count until its prompt is computed, `assumed` until it ends."""

    uncached_tokens: int
    blocks: int
    decided_ns: int
    stage: int = DECIDED
    assumed: bytes = b""


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
    steps: StepModel = msgspec.field(default_factory=StepModel)
    step_ms: float = 0.0
    told_ns: int = 0
    beliefs: Beliefs = msgspec.field(default_factory=Beliefs)
    rejoined: int = 0
    """Log position at which this epoch joined again after it had left, 0 if it never left."""

    @property
    def announces(self) -> bool:
        """Does its engine tell which blocks it holds? Workers of releases that did not say so do."""
        return not self.capabilities or "kv_events" in self.capabilities

    @property
    def takes_requests(self) -> bool:
        """May it be given anything new?"""
        return self.state == "ready" and not self.draining

    def promised(self, now_ns: int) -> tuple[int, int]:
        """(prompt tokens to compute, blocks held) by the requests given to this worker.

        Those that it should have accepted long ago do not count. They are left out here and not removed: what
        is in the state must not depend on whether a report or a decision came first.
        """
        return self.promised_within(now_ns, UNACCEPTED_NS_MAX)

    def promised_within(self, now_ns: int, unaccepted_ns_max: int) -> tuple[int, int]:
        """`promised`, without what was not accepted for so long."""
        tokens, blocks = self.prefill_tokens, self.decode_blocks
        for request in self.unaccepted:
            active = self.requests[request]
            age_ns = now_ns - active.decided_ns
            if age_ns > unaccepted_ns_max:
                tokens -= active.uncached_tokens
                blocks -= active.blocks
            elif age_ns < unaccepted_ns_max - SWAPPED_NS_MAX:
                # They come nearly in the order of their decisions: what follows is younger.
                break
        return tokens, blocks

    def computing_since(self, now_ns: int) -> tuple[int, int]:
        """(when it began with the prompt that it computes now, that one's tokens), as far as decisions and reports tell.

        (`now_ns`, 0) if it computes none.
        """
        for request in self.computing:
            active = self.requests[request]
            if active.stage != DECIDED or now_ns - active.decided_ns <= UNACCEPTED_NS_MAX:
                return max(active.decided_ns, self.told_ns), active.uncached_tokens
        return now_ns, 0
