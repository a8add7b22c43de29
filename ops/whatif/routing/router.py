"""The production router on virtual time: the same fold, events and decisions as in a fleet."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headwater.events.log import Record
from headwater.ops.config.errors import ConfigError
from headwater.ops.whatif.routing.log import EPOCH, LogReader, VirtualLog
from headwater.ops.whatif.routing.setup import RoutersSetup
from headwater.router.decision.context import DecisionContext
from headwater.router.decision.decide import decide, prompt_of
from headwater.router.decision.policies import POLICIES
from headwater.router.fold.state import RouterState
from headwater.router.queue.burst_order import order_by_regret
from headwater.schemas.constraints import Constraints, FlowControl, Preferences, RequestedLeg
from headwater.schemas.encoding.envelope import Batch
from headwater.schemas.events.fleet import WorkerJoined
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused
from headwater.schemas.hashing import U64, pack_hashes
from headwater.schemas.tables.capability import Capability

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
    needs: tuple[str, ...] = ()
    reader: str = ""


class DecisionCheck(Protocol):
    """Is shown each decision before the log has it."""

    def check(self, query: RouteQuery, decision: Decision, router: "VirtualRouter") -> None:
        """A router made a decision."""
        ...


class VirtualRouter:
    """A router of one pool at virtual time `now_ns`. Counts the wall seconds that decisions and the fold take.

    Its decisions count for it at once and are skipped when the log delivers them (those of the writers `own`), as in
    `actors.router.follower`. `unseen`: decisions of other routers that it has not read.
    """

    def __init__(self, name: str, setup: RoutersSetup, log: VirtualLog, reader: LogReader) -> None:
        if setup.policy not in POLICIES:
            raise ConfigError(f"--policy {setup.policy}: available are {', '.join(POLICIES)}")
        self.state = RouterState()
        self.reader = reader
        self.own = {name}
        self.now_ns = 0
        self.decisions = 0
        self.decide_s = 0.0
        self.fold_s = 0.0
        self.events = 0
        self.checks: list[DecisionCheck] = []
        self._name = name
        self._setup = setup
        self._log = log
        self._seen = 0
        self._known = 0
        self._query: RouteQuery | None = None

    @property
    def settled(self) -> bool:
        """Has the log delivered every decision of its own?"""
        return self._seen == self.decisions

    @property
    def unseen(self) -> int:
        """See the class."""
        return self._log.decisions - self._known

    def read(self, now_ns: int) -> None:
        """Fold the messages that are readable now."""
        self.now_ns = now_ns
        began = time.perf_counter()
        self._log.store_arrived(now_ns)
        while (record := self.reader.take(now_ns)) is not None:
            self._fold(record)
        self.fold_s += time.perf_counter() - began

    def _fold(self, record: Record) -> None:
        batch: Batch[Any] = record.batch
        self.events += len(batch.events)
        if batch.writer in self.own:
            # Applied when it was made.
            self.state.admit(record)
            self._seen += 1
            return
        self.state.apply(record)
        if isinstance(batch.events[0], Decision):
            self._known += 1

    def order_burst(self, questions: Sequence[Question], now_ns: int) -> list[int]:
        """Indices of questions that arrive at the same time, in the order in which a router decides them."""
        self.read(now_ns)
        return order_by_regret([self.query_of(question) for question in questions], self.choose)

    def query_of(self, question: Question) -> RouteQuery:
        """The route query of an edge."""
        return RouteQuery(
            question.name,
            question.prompt_tokens,
            question.max_tokens,
            pack_hashes(question.hashes),
            Constraints(leg=question.leg, pairs_with=question.pairs_with, needs=question.needs),
            Preferences(self._setup.policy, self._setup.temperature, question.session),
            FlowControl(tenant=question.tenant, waits=not (question.leg or question.needs)),
            reader=question.reader,
        )

    def choose(self, query: RouteQuery) -> Decision | RouteRefused:
        """Decide on the present state and change nothing."""
        began = time.perf_counter()
        self._query = query
        context = DecisionContext(
            number=self.decisions + 1,
            position=self.state.position,
            seen=self._seen,
            wall_ns=self.now_ns,
            weights=self._setup.weights,
            degraded=False,
        )
        state = self.state
        answer = decide(state.index, state.loads, state.cold, prompt_of(query), query, context)
        if not self._setup.credit and isinstance(answer, Decision):
            answer = msgspec.structs.replace(answer, assumed=b"")
        self.decide_s += time.perf_counter() - began
        return answer

    def commit(self, decision: Decision) -> Decision:
        """Apply a decision that was just chosen and append it to the log."""
        assert self._query is not None
        for check in self.checks:
            check.check(self._query, decision, self)
        self.decisions += 1
        self.apply_own(decision)
        self._log.append(self._name, self.now_ns, decision)
        return decision

    def apply_own(self, decision: Decision) -> None:
        """Apply a decision of a writer in `own`, ahead of the log."""
        self._known += 1
        self.state.loads.decide(decision)


def joined(
    worker: str,
    role: Any,
    block_size: int,
    blocks: int,
    running: int,
    capabilities: tuple[Capability, ...] = (),
) -> WorkerJoined:
    """The announcement of a simulated worker. Without capabilities it is taken for one that can do everything."""
    return WorkerJoined(
        worker,
        EPOCH,
        "sim",
        "sim",
        role,
        block_size,
        blocks,
        running,
        capabilities=capabilities,
        pairs_with=PAIR,
        instance=worker,
    )
