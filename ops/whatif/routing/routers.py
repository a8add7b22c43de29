"""All routers of a run: each folds one log with a delay of its own, and has a queue; requests are spread over them at random."""

from collections.abc import Iterator, Sequence
from random import Random

from headwater.ops.whatif.routing.log import NEVER, VirtualLog
from headwater.ops.whatif.routing.queue import Answered, QueueModel
from headwater.ops.whatif.routing.restart import Restart
from headwater.ops.whatif.routing.router import Question, VirtualRouter
from headwater.ops.whatif.routing.setup import RoutersSetup
from headwater.router.fold.state import RouterState
from headwater.router.queue.burst_order import order_by_prompt
from headwater.schemas.events.event import Event
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused


class Agreement:
    """All decisions compared with those of a single router that reads every message and decision without delay.

    `different`: of the `decisions`, those for another worker. `unseen_total` and `unseen_max`: decisions of other routers that the
    one that decided had not read.
    """

    def __init__(self, setup: RoutersSetup, log: VirtualLog) -> None:
        self.decisions = self.different = self.unseen_total = self.unseen_max = 0
        self._single = VirtualRouter("single", setup, log, log.reader(0))

    def check(self, query: RouteQuery, decision: Decision, router: VirtualRouter) -> None:
        """See `DecisionCheck`."""
        self._single.read(router.now_ns)
        other = self._single.choose(query)
        self.decisions += 1
        self.different += not isinstance(other, Decision) or other.worker != decision.worker
        self.unseen_total += router.unseen
        self.unseen_max = max(self.unseen_max, router.unseen)


class Routers:
    """See the module. `agreement` and `restart` are None unless the setup asks for them."""

    def __init__(self, setup: RoutersSetup) -> None:
        self._setup = setup
        self._log = VirtualLog(setup.event_delay_ns)
        self._routers = [
            VirtualRouter(f"router{number}", setup, self._log, self._log.reader(delay_ns))
            for number, delay_ns in enumerate(setup.delays_ns)
        ]
        self._queues = [QueueModel(router, setup) for router in self._routers]
        self._draw = Random(0)
        self.agreement: Agreement | None = None
        self.restart: Restart | None = None
        if setup.agreement:
            self.agreement = Agreement(setup, self._log)
            for router in self._routers:
                router.checks.append(self.agreement)
        if setup.kill_ns:
            self.restart = Restart(setup, self._log, self._routers[0])

    @property
    def state(self) -> RouterState:
        """The fold of the first router."""
        return self._routers[0].state

    def digests(self) -> list[str]:
        """The digest of each router's fold."""
        return [router.state.digest() for router in self._routers]

    def shares(self) -> list[int]:
        """The number of decisions of each router."""
        return [router.decisions for router in self._routers]

    @property
    def decisions(self) -> int:
        """Decisions of all routers."""
        return self._log.decisions

    @property
    def events(self) -> int:
        """Events folded, by all routers together."""
        return sum(router.events for router in self._routers)

    @property
    def decide_s(self) -> float:
        """Wall seconds that deciding took."""
        return sum(router.decide_s for router in self._routers)

    @property
    def fold_s(self) -> float:
        """Wall seconds that folding took."""
        return sum(router.fold_s for router in self._routers)

    @property
    def waiting(self) -> bool:
        """Do questions wait at any router?"""
        return any(map(len, self._queues))

    def send(self, worker: str, now_ns: int, *events: Event) -> None:
        """A worker publishes events, as one message."""
        self._log.send(worker, now_ns, *events)

    def offer_burst(self, burst: Sequence[Question], now_ns: int) -> Iterator[Answered]:
        """Answers to questions that arrive at the same time, in the order in which a router sends them; some may wait instead.

        Place each before taking the next: the worker then reports it.
        """
        shares: dict[int, list[Question]] = {}
        for question in burst:
            shares.setdefault(self._pick(now_ns), []).append(question)
        for number, share in sorted(shares.items()):
            found = []
            for index in self._routers[number].order_burst(share, now_ns):
                answer = self._queues[number].offer(share[index], now_ns)
                if answer is not None:
                    found.append(Answered(share[index], answer))
            for index in order_by_prompt([one.answer for one in found]):
                yield found[index]

    def offer(self, question: Question, now_ns: int) -> Decision | RouteRefused | None:
        """Where a request goes; None if it waits. A second leg never waits."""
        return self._queues[self._pick(now_ns)].offer(question, now_ns)

    def advance(self, now_ns: int) -> Iterator[Answered]:
        """Questions that no longer wait."""
        for queue in self._queues:
            if len(queue):
                yield from queue.advance(now_ns)

    def next_read_ns(self) -> int:
        """When a router with waiting questions can read its next message; `NEVER` if there is none."""
        return min(
            (
                self._log.readable_ns(router.reader)
                for router, queue in zip(self._routers, self._queues, strict=True)
                if len(queue)
            ),
            default=NEVER,
        )

    def finish(self) -> None:
        """Fold the rest of the log, at the end of a run."""
        for router in self._routers:
            router.read(NEVER)

    def _pick(self, now_ns: int) -> int:
        """The router that a query reaches: any that is there."""
        first = 0
        if self.restart is not None:
            successor = None if len(self._queues[0]) else self.restart.successor(now_ns)
            if successor is not None:
                self._routers[0], self._queues[0] = successor, QueueModel(successor, self._setup)
            first = int(self.restart.is_away(now_ns))
        return self._draw.randrange(first, len(self._routers)) if len(self._routers) > 1 else 0
