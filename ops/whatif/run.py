"""One run on virtual time: requests arrive, the router places them, workers compute."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

from headwater.engines.engine import KvEvent
from headwater.ops.bench.trace import Trace, TraceRequest, all_hashes, check_block_size
from headwater.ops.start.actor import compile_kernels
from headwater.ops.whatif.routing import NEVER, PAIR, Reply, Routers, joined, route_query
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.workers import (
    ActiveEncoding,
    EncodeFleet,
    SimulatedRequest,
    SimWorker,
    shapes,
)
from headwater.schemas.events import BlocksStored
from headwater.schemas.routing import NO_CONSTRAINTS, Constraints, Decision, RouteQuery, RouteRefused

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")

REPORT_NS = 1_000_000_000
"""A worker reports its load after a change, and at least this often."""

STEP, ARRIVAL, HANDED, READABLE, ENCODED, DELIVERED = range(6)
"""Events of equal time are handled in this order: ends of steps, arrivals of requests, arrivals of KV that was handed off,
and of messages at a router with a queue, images that were encoded, arrivals of their embeddings."""

Event = tuple[int, int, int, int]
"""(nanoseconds, kind, number of the worker, the request, the hand-off or the encoding, number of the worker's schedule)."""


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
    routers: Routers
    wall_s: float
    encoding: EncodeFleet


class VirtualRun:
    """See `run`."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._setup = setup
        self._trace = trace.first(setup.requests).faster(setup.speed)
        check_block_size(self._trace.requests, setup.block_size)
        self._hashes = all_hashes(self._trace.requests, setup.block_size)
        self._routers = Routers(setup)
        # Every router knows the workers when the first request arrives.
        self._joined_ns = -setup.event_delay_ns - max(setup.router_delays_ns)
        self._list = [SimWorker(shape, number, skip=setup.skip) for number, shape in enumerate(shapes(setup))]
        self._workers = {worker.shape.name: worker for worker in self._list}
        self._numbers = {request.name: number for number, request in enumerate(self._trace.requests)}
        self._events: list[Event] = []
        self._decode_legs: list[SimulatedRequest] = []
        self._encoding = EncodeFleet(setup, self._routers)
        for worker in self._list:
            worker.reads_embeddings = bool(self._encoding.encoders)
        self._encodings: list[ActiveEncoding] = []
        self._served: list[ServedRequest] = []
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
                self._finish_handoff(self._decode_legs[number], now_ns)
            elif kind == ENCODED:
                self._encoding.finish(self._encodings[number], now_ns)
            elif kind == DELIVERED:
                self._deliver(self._encodings[number], now_ns)
            elif kind == STEP and version == self._list[number].schedules:
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
            self._routers,
            wall_s,
            self._encoding,
        )

    def _arrive(self, first: int, last: int, now_ns: int) -> None:
        """Requests `first` to `last` - 1 arrive at the same time."""
        if now_ns >= self._reports_due_ns:
            self._send_regular_reports(now_ns)
        size, blocks = self._setup.block_size, self._setup.blocks
        burst: list[RouteQuery] = []
        for number in range(first, last):
            request = self._trace.requests[number]
            if -(-(request.prompt_tokens + request.output_tokens) // size) > blocks:
                self._refused += 1
                continue
            burst.append(self._query(request.name, number))
        for query, reply in self._routers.offer_burst(burst, now_ns):
            self._place(query, reply, now_ns)

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
        for query, reply in self._routers.advance(now_ns):
            self._place(query, reply, now_ns)
        readable_ns = self._routers.next_read_ns()
        if now_ns < readable_ns < NEVER and readable_ns != self._readable_ns:
            self._readable_ns = readable_ns
            heappush(self._events, (readable_ns, READABLE, 0, 0))

    def _query(self, name: str, number: int, constraints: Constraints = NO_CONSTRAINTS) -> RouteQuery:
        """The query for a leg of request `number`."""
        request = self._trace.requests[number]
        return route_query(
            self._setup,
            name,
            request.prompt_tokens,
            request.output_tokens,
            self._hashes[number],
            constraints,
            session=request.session,
            tenant=request.tenant,
        )

    def _place(self, query: RouteQuery, reply: Reply, now_ns: int) -> None:
        if isinstance(reply, RouteRefused):
            self._refused += 1
            return
        job = self._job(reply, self._numbers[query.request])
        job.given_ns = now_ns
        if not job.media or not self._await_embeddings(job, reply, now_ns):
            self._submit(job, now_ns)

    def _await_embeddings(self, job: SimulatedRequest, decision: Decision, now_ns: int) -> bool:
        """Have encode workers encode the images of a request. False: there is nothing to wait for."""
        for active in self._encoding.begin(job, decision, now_ns):
            self._encodings.append(active)
            number = len(self._encodings) - 1
            heappush(self._events, (active.ready_ns, ENCODED, number, 0))
            heappush(self._events, (active.arrives_ns, DELIVERED, number, 0))
        return bool(job.embeddings)

    def _deliver(self, active: ActiveEncoding, now_ns: int) -> None:
        if self._encoding.deliver(active):
            active.job.encoding_ns = now_ns - active.job.given_ns
            self._submit(active.job, now_ns)

    def _job(self, decision: Decision, number: int) -> SimulatedRequest:
        """What a worker gets of request `number`."""
        request = self._trace.requests[number]
        return SimulatedRequest(
            length=request.prompt_tokens,
            target=request.prompt_tokens,
            hashes=self._hashes[number].tolist(),
            name=decision.request,
            number=number,
            request=request,
            leg=decision.leg,
            worker=self._workers[decision.worker],
            media=request.media,
        )

    def _submit(self, job: SimulatedRequest, now_ns: int) -> None:
        name = job.worker.shape.name
        self._to_begin[name] = job.worker.submit(job, now_ns) or self._to_begin.get(name, False)

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
        worker.schedules += 1
        heappush(self._events, (worker.stretch.end_ns, STEP, worker.number, worker.schedules))

    def _report(self, worker: SimWorker, now_ns: int) -> None:
        if worker.moved:
            self._routers.send(worker.shape.name, now_ns, worker.report(now_ns))

    def _publish(self, worker: SimWorker, kv: list[KvEvent], now_ns: int) -> None:
        if kv:
            worker.stored_blocks += sum(len(e.hashes) // 8 for e in kv if isinstance(e, BlocksStored))
            self._routers.send(worker.shape.name, now_ns, *kv)

    def _step_ended(self, worker: SimWorker, now_ns: int) -> None:
        done, kv = worker.finish()
        self._publish(worker, kv, now_ns)
        self._report(worker, now_ns)
        for job in done:
            if job.leg == "prefill":
                self._start_handoff(job, now_ns)
            else:
                self._end(job)
        if worker.begin(now_ns):
            self._schedule(worker)

    def _start_handoff(self, leg: SimulatedRequest, now_ns: int) -> None:
        """A prompt is computed: query the router for the decode worker, as the edge does."""
        query = self._query(f"{leg.name}/decode", leg.number, Constraints(leg="decode", pairs_with=PAIR))
        decision = self._routers.offer(query, now_ns)
        if not isinstance(decision, Decision):
            leg.worker.release(leg)
            self._refused += 1
            return
        decode = self._job(decision, leg.number)
        decode.prefill, decode.arrived = leg, leg.request.prompt_tokens
        self._decode_legs.append(decode)
        arrives_ns = now_ns + self._setup.transfer_ns(decode.arrived)
        heappush(self._events, (arrives_ns, HANDED, len(self._decode_legs) - 1, 0))

    def _finish_handoff(self, decode: SimulatedRequest, now_ns: int) -> None:
        """The KV has arrived, so that the prefill leg need not pin it any more."""
        assert decode.prefill is not None
        source = decode.prefill.worker
        source.release(decode.prefill)
        if source.begin(now_ns):
            self._schedule(source)
        self._submit(decode, now_ns)

    def _end(self, job: SimulatedRequest) -> None:
        first = job.prefill or job
        self._served.append(
            ServedRequest(
                job.request,
                job.worker.shape.name,
                job.prefill.worker.shape.name if job.prefill is not None else "",
                max(0, first.cached) // self._setup.block_size,
                first.given_ns,
                first.began_ns,
                job.first_ns,
                job.done_ns,
                first.encoding_ns,
            )
        )


def run(trace: Trace, setup: Setup) -> RunResult:
    """Simulate a trace on a fleet. Equal arguments give equal results. Raises `ConfigError` for settings that conflict."""
    return VirtualRun(trace, setup)()


class Simulations:
    """Simulations in this process, or in `jobs` others. They are forked after the kernels are loaded, so that they start at once."""

    def __init__(self, jobs: int) -> None:
        compile_kernels()
        self._pool = ProcessPoolExecutor(jobs, mp_context=get_context("fork")) if jobs > 1 else None

    def __enter__(self) -> "Simulations":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def each(self, simulate: Callable[[JobT], ResultT], jobs: Sequence[JobT]) -> list[ResultT]:
        """What `simulate`, a function of a module, makes of each job."""
        return list((map if self._pool is None else self._pool.map)(simulate, jobs))
