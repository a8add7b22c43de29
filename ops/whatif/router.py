"""The production router on virtual time: the same fold, events and decisions as in a fleet."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.events.log import Record
from headwater.ops.config.errors import ConfigError
from headwater.router.decision.context import DecisionContext
from headwater.router.decision.decide import decide, prompt_of
from headwater.router.decision.policies import POLICIES
from headwater.router.fold.state import RouterState
from headwater.router.queue.burst_order import order_by_regret
from headwater.schemas.constraints import Constraints, FlowControl, Preferences, RequestedLeg
from headwater.schemas.encoding.envelope import Batch
from headwater.schemas.events.event import Event
from headwater.schemas.events.fleet import WorkerJoined
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused, Weights
from headwater.schemas.hashing import U64, pack_hashes

ROUTER = "router"
EPOCH = 1
PAIR = "sim"
"""All simulated workers can hand off KV to each other."""


class Question(NamedTuple):
    """A request as an edge describes it in its route query."""

    name: str
    prompt_tokens: int
    max_tokens: int
    hashes: U64
    leg: RequestedLeg = ""
    pairs_with: str = ""
    session: str = ""
    tenant: str = ""


class Routing:
    """A router of one pool at virtual time `now_ns`. Counts the wall seconds that decisions and the fold take."""

    def __init__(self, policy: str, weights: Weights, temperature: float) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"--policy {policy}: available are {', '.join(POLICIES)}")
        self.state = RouterState()
        self.now_ns = 0
        self.decisions = 0
        self.decide_s = 0.0
        self.fold_s = 0.0
        self.events = 0
        self._policy = policy
        self._weights = weights
        self._temperature = temperature

    def publish(self, writer: str, now_ns: int, *events: Event) -> None:
        """Append events of one writer to the pool log, as one message."""
        began = time.perf_counter()
        self.events += len(events)
        # Without a chain: no message can be missing here.
        batch: Batch[Any] = Batch(2, writer, EPOCH, 0, now_ns, events)
        self.state.apply(Record(self.state.position + 1, "", now_ns, batch))
        self.fold_s += time.perf_counter() - began

    def order_burst(self, questions: Sequence[Question], now_ns: int) -> list[int]:
        """Indices of questions that arrive at the same time, in the order in which a router decides them."""
        self.now_ns = now_ns
        return order_by_regret([self.query_of(question) for question in questions], self.choose)

    def query_of(self, question: Question) -> RouteQuery:
        """The route query of an edge."""
        return RouteQuery(
            question.name,
            question.prompt_tokens,
            question.max_tokens,
            pack_hashes(question.hashes),
            Constraints(leg=question.leg, pairs_with=question.pairs_with),
            Preferences(self._policy, self._temperature, question.session),
            FlowControl(tenant=question.tenant, waits=not question.leg),
        )

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide on the present state and change nothing."""
        began = time.perf_counter()
        context = DecisionContext(
            number=self.decisions + 1,
            position=self.state.position,
            seen=self.decisions,
            wall_ns=self.now_ns,
            weights=self._weights,
            degraded=False,
        )
        state = self.state
        answer = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        self.decide_s += time.perf_counter() - began
        return answer

    def commit(self, decision: Decision) -> Decision:
        """Apply a decision that was just chosen, as a router does."""
        self.decisions += 1
        self.publish(ROUTER, self.now_ns, decision)
        return decision


def joined(worker: str, role: Any, block_size: int, blocks: int, running: int) -> WorkerJoined:
    """The announcement of a simulated worker."""
    return WorkerJoined(
        worker, EPOCH, "sim", "sim", role, block_size, blocks, running, pairs_with=PAIR, instance=worker
    )
