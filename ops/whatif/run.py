"""One run on virtual time: requests arrive, the router places them, workers compute."""

import time
from heapq import heappop, heappush
from typing import NamedTuple

from headwater.engines.engine import KvEvent
from headwater.ops.bench.trace import Trace, TraceRequest, all_hashes, check_block_size
from headwater.ops.whatif.routing import NEVER, Question, Routers, joined
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.workers import (
    ActiveEncoding,
    EncodeFleet,
    SimulatedRequest,
    SimWorker,
    WaitingRequest,
    shapes,
)
from headwater.schemas.events import BlocksStored
from headwater.schemas.hashing import U64, tenant_digest
from headwater.schemas.routing import Decision, RouteRefused

REPORT_NS = 1_000_000_000
"""A worker reports its load after a change, and at least this often."""

STEP, ARRIVAL, HANDED, READABLE, ENCODED, DELIVERED = range(6)
"""Events of equal time are handled in this order: ends of steps, arrivals of requests, arrivals of KV that was handed off,
and of messages at a router with a queue, images that were encoded, arrivals of their embeddings."""

Event = tuple[int, int, int, int]
"""(nanoseconds, kind, number of the worker, the request, the hand-off or the encoding, version of the worker's step)."""


class ServedRequest(NamedTuple):
    """The outcome of one request. Times are nanoseconds from the start of the trace; `hit_blocks` of its prompt were cached.

    It waited `encoding_ns` for the embeddings of its images.
    """

    request: TraceRequest
    worker: str
    prefill_worker: str
    hit_blocks: int
    given_ns: int
    began_ns: int
    first_ns: int
    done_ns: int
    encoding_ns: int = 0


class RunResult(NamedTuple):
    """A whole run. `refused` requests got no worker; the simulation took `wall_s` seconds."""

    setup: Setup
    trace: str
    served: list[ServedRequest]
    refused: int
    workers: list[SimWorker]
    requests_a_worker: dict[str, int]
    routers: Routers
    wall_s: float
    encoding: EncodeFleet


class _Handoff(NamedTuple):
    """KV in transfer: the prefill leg that pins it and the decode leg that waits for it."""

    request: TraceRequest
    leg: SimulatedRequest
    source: SimWorker
    decode: SimulatedRequest
    target: SimWorker


class VirtualRun:
    """See `run`."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._setup = setup
        self._trace = trace.first(setup.requests).faster(setup.speed)
        check_block_size(self._trace.requests, setup.block_size)
        self._hashes = all_hashes(self._trace.requests, setup.block_size)
        routing = setup.routing()
        self._routers = Routers(routing)
        # Every router knows the workers when the first request arrives.
        self._joined_ns = -routing.event_delay_ns - max(routing.delays_ns)
        self._workers = {shape.name: SimWorker(shape, skip=setup.skip) for shape in shapes(setup)}
        self._numbers = {name: number for number, name in enumerate(self._workers)}
        self._list = list(self._workers.values())
        self._versions = [0] * len(self._list)
        self._given = dict.fromkeys(self._workers, 0)
        self._events: list[Event] = []
        self._handoffs: list[_Handoff] = []
        self._encoding = EncodeFleet(setup, self._routers)
        for worker in self._workers.values():
            worker.reads_embeddings = bool(self._encoding.encoders)
        self._encodings: list[ActiveEncoding] = []
        self._encoding_ns: dict[str, int] = {}
        self._requests: dict[str, TraceRequest] = {}
        self._legs: dict[str, tuple[SimulatedRequest, SimWorker, str]] = {}
        self._served: list[ServedRequest] = []
        self._numbers_of: dict[str, int] = {}
        self._refused = 0
        self._readable_ns = 0
        self._reports_due_ns = 0
        # Workers that were given requests at this time: `True` for those whose steps end earlier than scheduled.
        self._to_begin: dict[str, bool] = {}

    def __call__(self) -> RunResult:
        """Run the simulation."""
        began = time.perf_counter()
        setup = self._setup
        for worker in self._list:
            shape = worker.shape
            event = joined(
                shape.name,
                shape.role,
                setup.block_size,
                shape.blocks,
                setup.sequences,
                self._encoding.serving,
            )
            self._routers.send(shape.name, self._joined_ns, event)
        self._encoding.join(self._joined_ns)
        requests = self._trace.requests
        events = self._events
        for number in range(len(requests)):
            if not number or requests[number].arrival_ns != requests[number - 1].arrival_ns:
                events.append((requests[number].arrival_ns, ARRIVAL, number, 0))
        # The arrivals are sorted, so the list is a heap.
        while events:
            now_ns, kind, number, version = heappop(events)
            if kind == ARRIVAL:
                last = number
                while last < len(requests) and requests[last].arrival_ns == now_ns:
                    last += 1
                self._arrive(number, last, now_ns)
            elif kind == HANDED:
                self._finish_handoff(self._handoffs[number], now_ns)
            elif kind == ENCODED:
                self._encoding.finish(self._encodings[number], now_ns)
            elif kind == DELIVERED:
                self._deliver(self._encodings[number], now_ns)
            elif kind == STEP and version == self._versions[number]:
                self._step_ended(self._list[number], now_ns)
            if self._routers.waiting:
                self._serve_queues(now_ns)
            while self._to_begin:
                self._begin_steps(now_ns)
                # What the workers report may let the next request of a queue go.
                if self._routers.waiting:
                    self._serve_queues(now_ns)
        self._routers.finish()
        wall_s = time.perf_counter() - began
        return RunResult(
            setup,
            self._trace.name,
            self._served,
            self._refused,
            self._list,
            self._given,
            self._routers,
            wall_s,
            self._encoding,
        )

    def _arrive(self, first: int, last: int, now_ns: int) -> None:
        """Requests `first` to `last` - 1 arrive at the same time."""
        if now_ns >= self._reports_due_ns:
            self._send_regular_reports(now_ns)
        size, blocks = self._setup.block_size, self._setup.blocks
        burst: list[Question] = []
        for number in range(first, last):
            request = self._trace.requests[number]
            if -(-(request.prompt_tokens + request.output_tokens) // size) > blocks:
                self._refused += 1
                continue
            self._numbers_of[request.name] = number
            burst.append(self._question(request, number))
        for question, answer in self._routers.offer_burst(burst, now_ns):
            self._place(question, answer, now_ns)

    def _send_regular_reports(self, now_ns: int) -> None:
        """Send the reports of workers that have not reported for a while. Not called before the first of them can be due again."""
        for worker in self._list:
            if now_ns - worker.reported_ns >= REPORT_NS:
                report = worker.regular_report(now_ns)
                if report is not None:
                    self._routers.send(worker.shape.name, now_ns, report)
        self._reports_due_ns = min(worker.reported_ns for worker in self._list) + REPORT_NS

    def _serve_queues(self, now_ns: int) -> None:
        """Place requests whose queries waited at a router. While some still do, its next message is an event."""
        for question, answer in self._routers.advance(now_ns):
            self._place(question, answer, now_ns)
        readable_ns = self._routers.next_read_ns()
        if now_ns < readable_ns < NEVER and readable_ns != self._readable_ns:
            self._readable_ns = readable_ns
            heappush(self._events, (readable_ns, READABLE, 0, 0))

    def _question(self, request: TraceRequest, number: int) -> Question:
        return Question(
            request.name,
            request.prompt_tokens,
            request.output_tokens,
            self._hashes[number],
            session=request.session,
            tenant=request.tenant,
        )

    def _place(self, question: Question, decision: Decision | RouteRefused, now_ns: int) -> None:
        number = self._numbers_of.pop(question.name)
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
        if not job.media or not self._await_embeddings(job, worker, question, decision, now_ns):
            self._submit(worker, job, now_ns)

    def _await_embeddings(
        self,
        job: SimulatedRequest,
        worker: SimWorker,
        question: Question,
        decision: Decision,
        now_ns: int,
    ) -> bool:
        """Have encode workers encode the images of a request. False: there is nothing to wait for."""
        waiting = WaitingRequest(job, worker, question, now_ns)
        for active in self._encoding.begin(waiting, decision, now_ns):
            self._encodings.append(active)
            number = len(self._encodings) - 1
            heappush(self._events, (active.ready_ns, ENCODED, number, 0))
            heappush(self._events, (active.arrives_ns, DELIVERED, number, 0))
        return bool(waiting.left)

    def _deliver(self, active: ActiveEncoding, now_ns: int) -> None:
        if self._encoding.deliver(active):
            waiting = active.waiting
            self._encoding_ns[waiting.job.name] = now_ns - waiting.began_ns
            self._submit(waiting.worker, waiting.job, now_ns)

    def _job(self, request: TraceRequest, name: str, number: int, hashes: U64) -> SimulatedRequest:
        return SimulatedRequest(
            length=request.prompt_tokens,
            target=request.prompt_tokens,
            hashes=hashes.tolist(),
            name=name,
            number=number,
            leg="",
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            tenant=tenant_digest(request.tenant),
            media=request.media,
        )

    def _submit(self, worker: SimWorker, job: SimulatedRequest, now_ns: int) -> None:
        name = worker.shape.name
        self._given[name] += 1
        self._to_begin[name] = worker.submit(job, now_ns) or self._to_begin.get(name, False)

    def _begin_steps(self, now_ns: int) -> None:
        """Begin steps of the workers that were given requests: those of one time start together, in whichever order they were routed."""
        for name, earlier in self._to_begin.items():
            worker = self._workers[name]
            if worker.begin(now_ns) or earlier:
                self._schedule(worker)
            self._report(worker, now_ns)
        self._to_begin.clear()

    def _schedule(self, worker: SimWorker) -> None:
        """Schedule the end of the worker's steps; replaces an event scheduled earlier."""
        assert worker.stretch is not None
        number = self._numbers[worker.shape.name]
        self._versions[number] += 1
        heappush(self._events, (worker.stretch.end_ns, STEP, number, self._versions[number]))

    def _report(self, worker: SimWorker, now_ns: int) -> None:
        if worker.moved:
            self._routers.send(worker.shape.name, now_ns, worker.report(now_ns))

    def _publish(self, worker: SimWorker, kv: list[KvEvent], now_ns: int) -> None:
        if kv:
            worker.stored_blocks += sum(len(e.hashes) // 8 for e in kv if isinstance(e, BlocksStored))
            self._routers.send(worker.shape.name, now_ns, *kv)

    def _step_ended(self, worker: SimWorker, now_ns: int) -> None:
        outcome = worker.finish()
        self._publish(worker, outcome.kv, now_ns)
        self._report(worker, now_ns)
        for job in outcome.done:
            if job.leg == "prefill":
                self._start_handoff(job, worker, now_ns)
            else:
                self._end(job, worker)
        if worker.begin(now_ns):
            self._schedule(worker)

    def _start_handoff(self, leg: SimulatedRequest, worker: SimWorker, now_ns: int) -> None:
        """A prompt is computed: query the router for the decode worker, as the edge does."""
        request = self._requests[leg.name]
        question = self._question(request, leg.number)._replace(
            name=f"{leg.name}/decode", leg="decode", pairs_with=self._legs[leg.name][2]
        )
        decision = self._routers.offer(question, now_ns)
        if not isinstance(decision, Decision):
            worker.release(leg)
            self._refused += 1
            return
        decode = self._job(request, question.name, leg.number, question.hashes)
        decode.leg, decode.arrived = "decode", request.prompt_tokens
        target = self._workers[decision.worker]
        self._handoffs.append(_Handoff(request, leg, worker, decode, target))
        arrives_ns = now_ns + self._setup.transfer_ns(request.prompt_tokens)
        heappush(self._events, (arrives_ns, HANDED, len(self._handoffs) - 1, 0))

    def _finish_handoff(self, handoff: _Handoff, now_ns: int) -> None:
        handoff.source.release(handoff.leg)
        if handoff.source.begin(now_ns):
            self._schedule(handoff.source)
        self._requests[handoff.decode.name] = handoff.request
        self._submit(handoff.target, handoff.decode, now_ns)

    def _end(self, job: SimulatedRequest, worker: SimWorker) -> None:
        request = self._requests.pop(job.name)
        before, other, _ = self._legs.pop(request.name, (job, None, ""))
        self._served.append(
            ServedRequest(
                request,
                worker.shape.name,
                other.shape.name if other is not None else "",
                max(0, before.cached) // self._setup.block_size,
                before.given_ns,
                before.began_ns,
                job.first_ns,
                job.done_ns,
                self._encoding_ns.pop(request.name, 0),
            )
        )


def run(trace: Trace, setup: Setup) -> RunResult:
    """Simulate a trace on a fleet. Equal arguments give equal results. Raises `ConfigError` for settings that conflict."""
    return VirtualRun(trace, setup)()
