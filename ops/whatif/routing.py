"""The production router on virtual time: the same fold, events and decisions as in a fleet.

What the actor adds to it (long polls of edges) takes no time here.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

import msgspec

from headwater.events.ports import Record
from headwater.events.snapshot_store import Snapshot
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.setup import Setup
from headwater.router.admission import AdmissionQueue, Now, Released
from headwater.router.context import DecisionContext
from headwater.router.decide import decide, prompt_of
from headwater.router.policies import POLICIES
from headwater.router.queue import order_by_prompt, order_by_regret
from headwater.router.state import RouterState
from headwater.schemas.encoding import SCHEMA_VERSION, Batch
from headwater.schemas.events import Event, WorkerJoined
from headwater.schemas.hashing import U64, pack_hashes
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    Constraints,
    Decision,
    FlowControl,
    Preferences,
    RouteQuery,
    RouteRefused,
)
from headwater.schemas.tables import Capability

EPOCH: Final = 1
NEVER: Final = 1 << 62
"""Later than any time in nanoseconds."""


class LogReader:
    """The messages that a router has not read. Each is readable `delay_ns` after it was stored."""

    def __init__(self, delay_ns: int) -> None:
        self.delay_ns = delay_ns
        self.unread: deque[Record] = deque()

    def take(self, now_ns: int) -> Record | None:
        """The next message, if it is readable."""
        if self.unread and self.unread[0].stored_ns + self.delay_ns <= now_ns:
            return self.unread.popleft()
        return None


class VirtualLog:
    """The log of a run. `delay_ns` is that of workers; routers append without delay. Counts the `decisions` stored."""

    def __init__(self, delay_ns: int = 0) -> None:
        self.decisions = 0
        self._position = 0
        self._delay_ns = delay_ns
        self._sent: deque[Batch[Any]] = deque()
        self._readers: list[LogReader] = []

    def reader(self, delay_ns: int) -> LogReader:
        """A reader from the present position."""
        reader = LogReader(delay_ns)
        self._readers.append(reader)
        return reader

    def copy(self, reader: LogReader) -> LogReader:
        """Another reader of the same messages, with the same delay."""
        copied = self.reader(reader.delay_ns)
        copied.unread.extend(reader.unread)
        return copied

    def send(self, worker: str, now_ns: int, *events: Event) -> None:
        """A worker publishes events, as one message."""
        self._sent.append(_batch(worker, now_ns, events))

    def append(self, router: str, now_ns: int, event: Event) -> None:
        """A router stores an event."""
        self.store_arrived(now_ns)
        self.decisions += isinstance(event, Decision)
        self._store(_batch(router, now_ns, (event,)), now_ns)

    def store_arrived(self, now_ns: int) -> None:
        """Store the messages of workers that have arrived by now."""
        sent = self._sent
        while sent and sent[0].wall_ns + self._delay_ns <= now_ns:
            batch = sent.popleft()
            self._store(batch, batch.wall_ns + self._delay_ns)

    def readable_ns(self, reader: LogReader) -> int:
        """Return when its next message is readable; `NEVER` if there is none."""
        if reader.unread:
            return reader.unread[0].stored_ns + reader.delay_ns
        return self._sent[0].wall_ns + self._delay_ns + reader.delay_ns if self._sent else NEVER

    def _store(self, batch: Batch[Any], stored_ns: int) -> None:
        self._position += 1
        record = Record(self._position, "", stored_ns, batch)
        for reader in self._readers:
            reader.unread.append(record)


def _batch(writer: str, now_ns: int, events: tuple[Event, ...]) -> Batch[Any]:
    # Without a chain: no message can be missing here.
    return Batch(SCHEMA_VERSION, writer, EPOCH, 0, now_ns, events)


# One router.

PAIR: Final = "sim"
"""All simulated workers can hand off KV to each other."""

TICK_NS: Final = 250_000_000
"""How often expired queries are looked for, as in the router."""

SERVED_MAX: Final = 1 << 30
"""No bound: nothing else runs between two decisions of a replay."""

Reply = Decision | RouteRefused

Answered = tuple[RouteQuery, Reply]
"""A query and its reply."""


def route_query(
    setup: Setup,
    request: str,
    prompt_tokens: int,
    max_tokens: int,
    hashes: U64,
    constraints: Constraints = NO_CONSTRAINTS,
    *,
    session: str = "",
    tenant: str = "",
    reader: str = "",
) -> RouteQuery:
    """The query of an edge. That of a second leg, or of an image, never waits."""
    return RouteQuery(
        request,
        prompt_tokens,
        max_tokens,
        pack_hashes(hashes),
        constraints,
        Preferences(setup.policy, setup.temperature, session),
        FlowControl(tenant=tenant, waits=not (constraints.leg or constraints.needs)),
        reader=reader,
    )


class VirtualRouter:
    """A router of one pool at virtual time `now_ns`, with its admission queue. Counts the wall seconds that decisions and the fold take.

    Its decisions count for it at once and are skipped when the log delivers them (those of the writers `own`), as in
    `actors.router.follower`. `unseen`: decisions of other routers that it has not read. `checks` are shown each decision before the log
    has it. Without saturation limits in the setup nothing ever waits in the queue.
    """

    def __init__(self, name: str, setup: Setup, log: VirtualLog, reader: LogReader) -> None:
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
        self.checks: list[Callable[[RouteQuery, Decision, VirtualRouter], None]] = []
        self._name = name
        self._setup = setup
        self._log = log
        self._seen = 0
        self._known = 0
        self._query: RouteQuery | None = None
        self._queue = AdmissionQueue(setup.queue, self, _time(0))
        self._expired_ns = 0
        self._displaced: list[Released] = []

    @property
    def settled(self) -> bool:
        """Has the log delivered every decision of its own?"""
        return self._seen == self.decisions

    @property
    def unseen(self) -> int:
        """See the class."""
        return self._log.decisions - self._known

    @property
    def waiting(self) -> bool:
        """Do queries wait in its queue?"""
        return bool(self._queue.waiting)

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

    def order_burst(self, queries: Sequence[RouteQuery], now_ns: int) -> list[int]:
        """Indices of queries that arrive at the same time, in the order in which a router decides them."""
        self.read(now_ns)
        return order_by_regret(queries, self.choose)

    def choose(self, query: RouteQuery) -> Reply:
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
        if self._setup.credit == "off" and isinstance(answer, Decision):
            answer = msgspec.structs.replace(answer, assumed=b"")
        self.decide_s += time.perf_counter() - began
        return answer

    def commit(self, decision: Decision) -> Decision:
        """Apply a decision that was just chosen and append it to the log."""
        assert self._query is not None
        for check in self.checks:
            check(self._query, decision, self)
        self.decisions += 1
        self.apply_own(decision)
        self._log.append(self._name, self.now_ns, decision)
        return decision

    def apply_own(self, decision: Decision) -> None:
        """Apply a decision of a writer in `own`, ahead of the log."""
        self._known += 1
        self.state.loads.decide(decision)

    def offer(self, query: RouteQuery, now_ns: int) -> Reply | None:
        """Return where a request goes; None if it waits."""
        offered = self._queue.offer(query, self._read_for_queue(now_ns))
        self._displaced += offered.displaced
        return offered.reply

    def advance(self, now_ns: int) -> list[Answered]:
        """Queries that no longer wait, in the order of the queue."""
        now = self._read_for_queue(now_ns)
        released, self._displaced = self._displaced, []
        if now_ns - self._expired_ns >= TICK_NS:
            self._expired_ns = now_ns
            released += self._queue.expire(now)
        released += self._queue.advance(now, SERVED_MAX)[0]
        return [(one.queued.query, one.reply) for one in released]

    def _read_for_queue(self, now_ns: int) -> Now:
        self.read(now_ns)
        now = _time(now_ns)
        # Simulated workers report every second, so the log is never silent.
        self._queue.note_fold_advanced(now)
        return now


def _time(now_ns: int) -> Now:
    return Now(now_ns / 1e9, now_ns)


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


# A router that is killed and returns, and a twin that lives on and shows the difference.

AWAY_NS = 250_000_000
"""The time from the kill to the return."""


class Restart:
    """A router that is killed and returns, beside a twin that lives on.

    The snapshot is taken half way to the kill, as soon as the log holds all decisions of the router. Queries in its queue are still answered when it is killed: an edge would ask another router.

    `states_equal`: at its return it had the state of the twin. `decisions`: those made since, of which `different` differ from
    the twin's in their worker, a cost or the position.
    """

    def __init__(self, setup: Setup, log: VirtualLog, twin: VirtualRouter) -> None:
        self.decisions = self.different = 0
        self.returned = self.states_equal = False
        self._kill_ns = round(setup.restart_s * 1e9)
        self._setup = setup
        self._log = log
        self._twin = twin
        self._snapshot: Snapshot | None = None
        self._tail: LogReader | None = None

    def is_away(self, now_ns: int) -> bool:
        """Is the router killed and not back yet?"""
        if self._tail is None and now_ns >= self._kill_ns // 2:
            self._save(now_ns)
        return self._tail is not None and self._kill_ns <= now_ns and not self.returned

    def _save(self, now_ns: int) -> None:
        self._twin.read(now_ns)
        if self._twin.settled:
            self._snapshot = self._twin.state.snapshot()
            self._tail = self._log.copy(self._twin.reader)

    def successor(self, now_ns: int) -> VirtualRouter | None:
        """The next incarnation, when it is time for its return."""
        if self.returned or self._snapshot is None or self._tail is None or now_ns < self._kill_ns + AWAY_NS:
            return None
        self._twin.read(now_ns)
        if not self._twin.settled:
            return None
        router = VirtualRouter("returned", self._setup, self._log, self._tail)
        router.state = RouterState.restore(self._snapshot)
        router.read(now_ns)
        self.returned = True
        self.states_equal = router.state.digest() == self._twin.state.digest()
        self._twin.own.add("returned")
        router.checks = [*self._twin.checks, self._check]
        return router

    def _check(self, query: RouteQuery, decision: Decision, router: VirtualRouter) -> None:
        """Have the twin decide the same query."""
        self._twin.read(router.now_ns)
        other = self._twin.choose(query)
        self.decisions += 1
        self.different += not isinstance(other, Decision) or _facts(other) != _facts(decision)
        self._twin.apply_own(decision)


def _facts(decision: Decision) -> Decision:
    """A decision without what counts the decisions of its router."""
    return msgspec.structs.replace(decision, number=0, seen=0)


# All routers of a run: each folds one log with its own delay; requests are spread at random.


class Agreement:
    """All decisions compared with those of a single router that reads every message and decision without delay.

    `different`: of the `decisions`, those for another worker. `unseen_total` and `unseen_max`: decisions of other routers that the
    one that decided had not read.
    """

    def __init__(self, setup: Setup, log: VirtualLog) -> None:
        self.decisions = self.different = self.unseen_total = self.unseen_max = 0
        self._single = VirtualRouter("single", setup, log, log.reader(0))

    def check(self, query: RouteQuery, decision: Decision, router: VirtualRouter) -> None:
        """Have the single router decide the same query."""
        self._single.read(router.now_ns)
        other = self._single.choose(query)
        self.decisions += 1
        self.different += not isinstance(other, Decision) or other.worker != decision.worker
        self.unseen_total += router.unseen
        self.unseen_max = max(self.unseen_max, router.unseen)


class Routers:
    """The routers of a run. `agreement` and `restart` are None unless the setup asks for them."""

    def __init__(self, setup: Setup) -> None:
        self._log = VirtualLog(setup.event_delay_ns)
        self.each = [
            VirtualRouter(f"router{number}", setup, self._log, self._log.reader(delay_ns))
            for number, delay_ns in enumerate(setup.router_delays_ns)
        ]
        self._draw = Random(0)
        self.agreement: Agreement | None = None
        self.restart: Restart | None = None
        if setup.agreement:
            self.agreement = Agreement(setup, self._log)
            for router in self.each:
                router.checks.append(self.agreement.check)
        if setup.restart_s:
            self.restart = Restart(setup, self._log, self.each[0])

    @property
    def state(self) -> RouterState:
        """The fold of the first router."""
        return self.each[0].state

    @property
    def decisions(self) -> int:
        """Decisions of all routers."""
        return self._log.decisions

    @property
    def waiting(self) -> bool:
        """Do queries wait at any router?"""
        return any(router.waiting for router in self.each)

    def send(self, worker: str, now_ns: int, *events: Event) -> None:
        """A worker publishes events, as one message."""
        self._log.send(worker, now_ns, *events)

    def offer_burst(self, burst: Sequence[RouteQuery], now_ns: int) -> Iterator[Answered]:
        """Answers to queries that arrive at the same time, in the order in which a router sends them; some may wait instead.

        Place each before taking the next: the worker then reports it.
        """
        shares: dict[int, list[RouteQuery]] = {}
        for query in burst:
            shares.setdefault(self._pick(now_ns), []).append(query)
        for number, share in sorted(shares.items()):
            router = self.each[number]
            answered: list[Answered] = []
            for index in router.order_burst(share, now_ns):
                reply = router.offer(share[index], now_ns)
                if reply is not None:
                    answered.append((share[index], reply))
            for index in order_by_prompt([reply for _, reply in answered]):
                yield answered[index]

    def offer(self, query: RouteQuery, now_ns: int) -> Reply | None:
        """Return where a request goes; None if it waits."""
        return self.each[self._pick(now_ns)].offer(query, now_ns)

    def advance(self, now_ns: int) -> Iterator[Answered]:
        """Queries that no longer wait."""
        for router in self.each:
            if router.waiting:
                yield from router.advance(now_ns)

    def next_read_ns(self) -> int:
        """Return when a router with waiting queries can read its next message; `NEVER` if there is none."""
        waiting = (router.reader for router in self.each if router.waiting)
        return min(map(self._log.readable_ns, waiting), default=NEVER)

    def finish(self) -> None:
        """Fold the rest of the log, at the end of a run."""
        for router in self.each:
            router.read(NEVER)

    def _pick(self, now_ns: int) -> int:
        """The router that a query reaches: any that is there."""
        first = 0
        if self.restart is not None:
            successor = None if self.each[0].waiting else self.restart.successor(now_ns)
            if successor is not None:
                self.each[0] = successor
            first = int(self.restart.is_away(now_ns))
        return self._draw.randrange(first, len(self.each)) if len(self.each) > 1 else 0
