"""One run: requests arrive, the router says where they go, workers compute, and everything is on virtual time."""

import time
from heapq import heappop, heappush
from typing import NamedTuple

from headwater.ops.whatif.door import Door
from headwater.ops.whatif.fleet import Job, SimWorker
from headwater.ops.whatif.routing import Question, Routing, joined
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.trace import Asked, Trace, check_block_size, hashes_of
from headwater.schemas.hashing import U64
from headwater.schemas.kv import BlocksStored
from headwater.schemas.route import Decision, RouteRefused

REPORT_NS = 1_000_000_000
"""An engine actor tells its load after a change, and after this time anyway."""

STEP, ARRIVAL, HANDED = range(3)
"""At one moment steps end first, then requests arrive, then KV does."""

Event = tuple[int, int, int, int]
"""(nanoseconds, kind, number of the worker, the request or the hand-off, version of the worker's step)."""


class Served(NamedTuple):
    """What became of one request: nanoseconds from the trace's start, blocks of its prompt found cached."""

    request: Asked
    worker: str
    prefill_worker: str
    hit_blocks: int
    given_ns: int
    began_ns: int
    first_ns: int
    done_ns: int


class Ran(NamedTuple):
    """A whole run. `refused` requests fit no worker; `wall_s` is how long it took to simulate."""

    setup: Setup
    trace: str
    served: list[Served]
    refused: int
    workers: list[SimWorker]
    requests_a_worker: dict[str, int]
    routing: Routing
    wall_s: float


class _HandOver(NamedTuple):
    """KV on its way: the prefill leg that pins it and the decode leg that waits for it."""

    request: Asked
    leg: Job
    source: SimWorker
    behind: Job
    target: SimWorker


class Run:
    """See `run`."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._setup = setup
        self._trace = trace.first(setup.requests).faster(setup.speed)
        check_block_size(self._trace.requests, setup.block_size)
        self._routing = Routing(setup.policy, setup.weights, setup.temperature)
        self._door = Door(self._routing, setup)
        self._workers = {shape.name: SimWorker(shape, skip=setup.skip) for shape in setup.shapes()}
        self._numbers = {name: number for number, name in enumerate(self._workers)}
        self._list = list(self._workers.values())
        self._versions = [0] * len(self._list)
        self._given = dict.fromkeys(self._workers, 0)
        self._events: list[Event] = []
        self._hand_overs: list[_HandOver] = []
        self._requests: dict[str, Asked] = {}
        self._legs: dict[str, tuple[Job, SimWorker, str]] = {}
        self._served: list[Served] = []
        self._places: dict[str, int] = {}
        self._refused = 0

    def __call__(self) -> Ran:
        """Run it."""
        began = time.perf_counter()
        setup = self._setup
        for shape in setup.shapes():
            event = joined(shape.name, shape.role, setup.block_size, shape.blocks, setup.sequences)
            self._routing.tell(shape.name, 0, event)
        requests = self._trace.requests
        events = self._events
        for number in range(len(requests)):
            if not number or requests[number].arrival_ns != requests[number - 1].arrival_ns:
                events.append((requests[number].arrival_ns, ARRIVAL, number, 0))
        # Sorted as they are, arrivals are a heap already.
        while events:
            now_ns, kind, number, version = heappop(events)
            if kind == ARRIVAL:
                last = number
                while last < len(requests) and requests[last].arrival_ns == now_ns:
                    last += 1
                self._arrive_together(number, last, now_ns)
            elif kind == HANDED:
                self._handed(self._hand_overs[number], now_ns)
            elif version == self._versions[number]:
                self._step_ended(self._list[number], now_ns)
            if self._door:
                self._take_turns(now_ns)
        wall_s = time.perf_counter() - began
        return Ran(
            setup,
            self._trace.name,
            self._served,
            self._refused,
            self._list,
            self._given,
            self._routing,
            wall_s,
        )

    def _arrive_together(self, first: int, last: int, now_ns: int) -> None:
        """Requests `first` to `last` - 1 come at the same moment."""
        for worker in self._list:
            if now_ns - worker.reported_ns >= REPORT_NS:
                self._routing.tell(worker.shape.name, now_ns, worker.report(now_ns))
        size, blocks = self._setup.block_size, self._setup.blocks
        asked: list[Question] = []
        for number in range(first, last):
            request = self._trace.requests[number]
            if -(-(request.prompt_tokens + request.output_tokens) // size) > blocks:
                self._refused += 1
                continue
            self._places[request.name] = number
            asked.append(self._question(request))
        for place in self._routing.in_order(asked, now_ns):
            answer = self._door.ask(asked[place], now_ns)
            if answer is not None:
                self._answered(asked[place], answer, now_ns)

    def _take_turns(self, now_ns: int) -> None:
        """Questions that waited at the router."""
        for question, answer in self._door.turn(now_ns):
            self._answered(question, answer, now_ns)

    def _question(self, request: Asked) -> Question:
        return Question(
            request.name,
            request.prompt_tokens,
            request.output_tokens,
            hashes_of(request, self._setup.block_size),
            session=request.session,
            tenant=request.tenant,
        )

    def _answered(self, question: Question, decision: Decision | RouteRefused, now_ns: int) -> None:
        number = self._places.pop(question.name)
        if isinstance(decision, RouteRefused):
            self._refused += 1
            return
        request = self._trace.requests[number]
        worker = self._workers[decision.worker]
        job = self._job(request, request.name, number, question.hashes)
        job.leg, job.given_ns = decision.leg, now_ns
        if job.leg == "prefill":
            self._legs[job.name] = (job, worker, decision.pairs_with)
        self._requests[job.name] = request
        self._submit(worker, job, now_ns)

    def _job(self, request: Asked, name: str, number: int, hashes: U64) -> Job:
        return Job(
            length=request.prompt_tokens,
            target=request.prompt_tokens,
            hashes=hashes.tolist(),
            name=name,
            number=number,
            leg="",
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
        )

    def _submit(self, worker: SimWorker, job: Job, now_ns: int) -> None:
        self._given[worker.shape.name] += 1
        earlier = worker.submit(job, now_ns)
        if worker.begin(now_ns) or earlier:
            self._schedule(worker)
        self._tell(worker, now_ns)

    def _schedule(self, worker: SimWorker) -> None:
        """The end of the worker's steps, in place of the one told before."""
        assert worker.stretch is not None
        number = self._numbers[worker.shape.name]
        self._versions[number] += 1
        heappush(self._events, (worker.stretch.end_ns, STEP, number, self._versions[number]))

    def _tell(self, worker: SimWorker, now_ns: int) -> None:
        if worker.moved:
            self._routing.tell(worker.shape.name, now_ns, worker.report(now_ns))

    def _step_ended(self, worker: SimWorker, now_ns: int) -> None:
        outcome = worker.finish()
        name = worker.shape.name
        if outcome.kv:
            worker.stored_blocks += sum(len(e.hashes) // 8 for e in outcome.kv if isinstance(e, BlocksStored))
            self._routing.tell(name, now_ns, *outcome.kv)
        self._tell(worker, now_ns)
        for job in outcome.done:
            if job.leg == "prefill":
                self._hand_over(job, worker, now_ns)
            else:
                self._end(job, worker)
        if worker.begin(now_ns):
            self._schedule(worker)

    def _hand_over(self, leg: Job, worker: SimWorker, now_ns: int) -> None:
        """A prompt is computed: the edge asks who goes on behind it, as it does in a fleet."""
        request = self._requests[leg.name]
        question = self._question(request)._replace(
            name=f"{leg.name}/decode", asked="decode", pairs_with=self._legs[leg.name][2]
        )
        decision = self._door.ask(question, now_ns)
        if not isinstance(decision, Decision):
            worker.let_go(leg)
            self._refused += 1
            return
        behind = self._job(request, question.name, leg.number, question.hashes)
        behind.leg, behind.arrived = "decode", request.prompt_tokens
        target = self._workers[decision.worker]
        self._hand_overs.append(_HandOver(request, leg, worker, behind, target))
        arrives_ns = now_ns + self._setup.transfer_ns(request.prompt_tokens)
        heappush(self._events, (arrives_ns, HANDED, len(self._hand_overs) - 1, 0))

    def _handed(self, over: _HandOver, now_ns: int) -> None:
        over.source.let_go(over.leg)
        if over.source.begin(now_ns):
            self._schedule(over.source)
        self._requests[over.behind.name] = over.request
        self._submit(over.target, over.behind, now_ns)

    def _end(self, job: Job, worker: SimWorker) -> None:
        request = self._requests.pop(job.name)
        before, other, _ = self._legs.pop(request.name, (job, None, ""))
        self._served.append(
            Served(
                request,
                worker.shape.name,
                other.shape.name if other is not None else "",
                max(0, before.cached) // self._setup.block_size,
                before.given_ns,
                before.began_ns,
                job.first_ns,
                job.done_ns,
            )
        )


def run(trace: Trace, setup: Setup) -> Ran:
    """A trace through a fleet. The same twice gives the same. Raises `ConfigError` for what can not be."""
    return Run(trace, setup)()
