"""The production router on virtual time: the same fold, the same events, the same decisions as in a fleet."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.events.log import Record
from headwater.ops.config import ConfigError
from headwater.router.candidates import Standing
from headwater.router.decide import decide, prompt_of
from headwater.router.policies import POLICIES
from headwater.router.state import RouterState
from headwater.router.together import most_particular_first
from headwater.schemas.envelope import Batch, Event
from headwater.schemas.fleet import WorkerJoined
from headwater.schemas.hashing import U64, pack_hashes
from headwater.schemas.route import Decision, RouteQuery, RouteRefused, Weights

ROUTER = "router"
EPOCH = 1
PAIR = "sim"
"""All simulated workers can hand KV over to each other."""


class Question(NamedTuple):
    """What an edge knows of a request."""

    name: str
    prompt_tokens: int
    max_tokens: int
    hashes: U64
    asked: Any = ""
    pairs_with: str = ""
    session: str = ""
    tenant: str = ""


class Routing:
    """A router of one pool. Counts what it spends: wall seconds in decisions and in the fold."""

    def __init__(self, policy: str, weights: Weights, temperature: float) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"--policy {policy}: there are {', '.join(POLICIES)}")
        self.state = RouterState()
        self.decisions = 0
        self.decide_s = 0.0
        self.fold_s = 0.0
        self.events = 0
        self._policy = policy
        self._weights = weights
        self._temperature = temperature

    def tell(self, writer: str, now_ns: int, *events: Event) -> None:
        """Events of one writer as one message of the pool log."""
        began = time.perf_counter()
        self.events += len(events)
        # No chain is written: every message is here by construction.
        batch: Batch[Any] = Batch(2, writer, EPOCH, 0, now_ns, events)
        self.state.apply(Record(self.state.position + 1, "", now_ns, batch))
        self.fold_s += time.perf_counter() - began

    def in_order(self, questions: Sequence[Question], now_ns: int) -> list[int]:
        """Places of questions that come at the same moment, in the order in which a router decides them."""
        return most_particular_first(
            [self.query_of(question) for question in questions], lambda query: self.choose(query, now_ns)
        )

    def query_of(self, question: Question) -> RouteQuery:
        """What an edge would ask."""
        return RouteQuery(
            question.name,
            question.prompt_tokens,
            question.max_tokens,
            pack_hashes(question.hashes),
            asked=question.asked,
            pairs_with=question.pairs_with,
            policy=self._policy,
            temperature=self._temperature,
            session=question.session,
            tenant=question.tenant,
            waits=not question.asked,
        )

    def choose(self, query: RouteQuery, now_ns: int) -> Decision | RouteRefused:
        """Decide and change nothing."""
        began = time.perf_counter()
        standing = Standing(
            number=self.decisions + 1,
            position=self.state.position,
            seen=self.decisions,
            wall_ns=now_ns,
            weights=self._weights,
            degraded=False,
        )
        state = self.state
        answer = decide(state.index, state.loads, state.cold, prompt_of(query), query, standing)
        self.decide_s += time.perf_counter() - began
        return answer

    def commit(self, decision: Decision, now_ns: int) -> Decision:
        """What was just chosen is in the state at once, as in a router."""
        self.decisions += 1
        self.tell(ROUTER, now_ns, decision)
        return decision


def joined(worker: str, role: Any, block_size: int, blocks: int, running: int) -> WorkerJoined:
    """A simulated worker as it announces itself."""
    return WorkerJoined(
        worker, EPOCH, "sim", "sim", role, block_size, blocks, running, pairs_with=PAIR, instance=worker
    )
