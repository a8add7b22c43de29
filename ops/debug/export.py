"""`headwater export --perfetto`: the requests, load and changes of a fleet between two places of its logs, for a trace viewer.

Both logs are read once, merged by time. A request is written when it ends, so that memory holds the open ones only.

The trace is in Chrome's JSON format, as ui.perfetto.dev reads it. A process stands for an edge or a worker, a thread for one of its lanes:
what is in one lane never overlaps, unless it is nested. Times are microseconds since the trace's start.
"""

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Log, Record
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.places import (
    PoolLog,
    earliest,
    find_position,
    merged,
    open_log,
    scan_each,
    stored_at,
)
from headwater.ops.debug.tail import tag_of, text_of
from headwater.ops.history.request_spans import Span, Stamped, waterfall
from headwater.ops.history.requests import request_of
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.terminal import Progress, fields_of, iso_time
from headwater.schemas.events import (
    EnginesWeighted,
    Event,
    LoadReported,
    RequestAccepted,
    RequestCheckpoint,
    RequestEnded,
    RequestStepped,
    TrafficSplit,
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from headwater.schemas.routing import Decision
from headwater.schemas.subjects import ANY, PoolKind, pool_subject, request_filter

EVENTS_LANE: Final = 1
"""The thread of a process's instants; its other lanes follow."""

Value = int | float


class Slice(NamedTuple):
    """Something that takes time, from one time to another in ns, with what is nested in it."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    arguments: Mapping[str, Any] = {}
    nested: Sequence["Slice"] = ()


class _Process:
    """A process of the trace: its id, and the end of the last slice in each of its lanes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.lanes: list[int] = []
        self.counters: dict[str, tuple[int, tuple[Value, ...]]] = {}

    def lane(self, start_ns: int, end_ns: int) -> int:
        """The first lane that is free from a time on; it is taken until another one."""
        for number, free_ns in enumerate(self.lanes):
            if free_ns <= start_ns:
                self.lanes[number] = end_ns
                return number
        self.lanes.append(end_ns)
        return len(self.lanes) - 1


class TraceWriter:
    """Writes the events of a trace to a file, in any order of processes; `close` ends it. Holds what is open, and nothing of what was written."""

    def __init__(self, file: BinaryIO, start_ns: int, about: Mapping[str, Any]) -> None:
        self.written = 0
        self._file = file
        self._start_ns = start_ns
        self._processes: dict[str, _Process] = {}
        self._encode = msgspec.json.Encoder().encode
        head = self._encode({"displayTimeUnit": "ms", "otherData": about})
        file.write(head[:-1] + b',"traceEvents":[\n')

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write((b",\n" if self.written else b"") + self._encode(event))
        self.written += 1

    def _us(self, time_ns: int) -> float:
        return max(0, time_ns - self._start_ns) / 1000

    def process(self, name: str, order: int) -> None:
        """Name a process before its first event; `order` sorts processes, and those of one order are in that of their names' first use."""
        if name in self._processes:
            return
        trace_process = self._processes[name] = _Process(len(self._processes) + 1)
        self._metadata(trace_process.pid, EVENTS_LANE, "process_name", {"name": name})
        self._metadata(trace_process.pid, EVENTS_LANE, "process_sort_index", {"sort_index": order})
        self._metadata(trace_process.pid, EVENTS_LANE, "thread_name", {"name": "events"})

    def _metadata(self, pid: int, tid: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._write({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments})

    def _event(
        self, phase: str, name: str, pid: int, time_ns: int, arguments: Mapping[str, Any], **more: str
    ) -> None:
        """An event of a process at a time."""
        place = {"pid": pid, "tid": EVENTS_LANE, "ts": self._us(time_ns)}
        self._write({"ph": phase, "name": name, **more, **place, "args": arguments})

    def slices(self, process: str, several: Sequence[Slice], lane: str) -> None:
        """Write slices of which none overlaps another, in order, in one lane; new lanes are named `lane` and a number."""
        if not several:
            return
        owner = self._processes[process]
        lanes = len(owner.lanes)
        number = owner.lane(several[0].start_ns, several[-1].end_ns)
        tid = EVENTS_LANE + 1 + number
        if number == lanes:
            self._metadata(owner.pid, tid, "thread_name", {"name": f"{lane} {number + 1}"})
            self._metadata(owner.pid, tid, "thread_sort_index", {"sort_index": tid})
        self._slices(owner.pid, tid, several)

    def _slices(self, pid: int, tid: int, several: Iterable[Slice]) -> None:
        for piece in several:
            start_us = self._us(piece.start_ns)
            event = {
                "ph": "X",
                "name": piece.name,
                "cat": piece.category,
                "pid": pid,
                "tid": tid,
                "ts": start_us,
                "dur": max(0.0, self._us(piece.end_ns) - start_us),
                "args": piece.arguments,
            }
            self._write(event)
            self._slices(pid, tid, piece.nested)

    def counter(self, process: str, name: str, time_ns: int, values: Mapping[str, Value]) -> None:
        """Write the values of a counter, if they differ from the last ones. Times of one counter must not fall."""
        owner = self._processes[process]
        now = tuple(values.values())
        latest = owner.counters.get(name)
        if latest is not None and latest[1] == now:
            return
        time_ns = max(time_ns, latest[0]) if latest is not None else time_ns
        owner.counters[name] = (time_ns, now)
        self._event("C", name, owner.pid, time_ns, values)

    def instant(self, process: str, name: str, time_ns: int, arguments: Mapping[str, Any]) -> None:
        """Write a moment of a process."""
        self._event("i", name, self._processes[process].pid, time_ns, arguments, s="p")

    def close(self) -> None:
        """End the document."""
        self._file.write(b"\n]}\n")


KINDS: Final[tuple[PoolKind, ...]] = ("fleet", "load", "route")

OPEN_MAX: Final = 100_000
"""Open requests, and requests with decisions only, that are held; beyond, the oldest is left out."""

FLEET_ORDER, EDGE_ORDER, WORKER_ORDER = 0, 1, 2
FLEET: Final = "fleet"

OF_A_WORKER: Final = (WorkerJoined, WorkerChanged, WorkerDraining, WorkerLeft, WorkerControlled)


class _Held(msgspec.Struct):
    """An open request: its edge, its events so far, and the decisions about it."""

    edge: str = ""
    events: list[Stamped] = []
    decisions: list[Decision] = []


class Exported(NamedTuple):
    """What a trace has: requests that ended, those that were still open, events of the trace, and requests that were left out."""

    ended: int
    open: int
    events: int
    left_out: int


class Exporter:
    """Turns the messages of both logs, in the order of time, into events of a trace."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._held: dict[str, _Held] = {}
        self._ended = 0
        self._left_out = 0
        writer.process(FLEET, FLEET_ORDER)

    def pool(self, record: Record) -> None:
        """Take a message of the pool's log."""
        time_ns = record.stored_ns
        for event in record.batch.events:
            if isinstance(event, Decision):
                self._hold(request_of(event.request)).decisions.append(event)
            elif isinstance(event, LoadReported):
                self._load(record.batch.writer, event, time_ns)
            elif isinstance(event, OF_A_WORKER):
                self._worker(event.worker)
                self._instant(event.worker, event, time_ns)
            elif isinstance(event, EnginesWeighted | TrafficSplit):
                self._instant(FLEET, event, time_ns)

    def _worker(self, name: str) -> str:
        self._writer.process(name, WORKER_ORDER)
        return name

    def _instant(self, process: str, event: Event, time_ns: int) -> None:
        self._writer.instant(process, tag_of(event), time_ns, {"what": text_of(event)})

    def _load(self, worker: str, event: LoadReported, time_ns: int) -> None:
        self._worker(worker)
        load = {"running": event.running, "waiting": event.waiting}
        self._writer.counter(worker, "requests", time_ns, load)
        used = round(100 * event.used_blocks / max(1, event.total_blocks), 2)
        self._writer.counter(worker, "KV used %", time_ns, {"used": used})

    def request(self, record: Record) -> None:
        """Take a message of the request log."""
        for event in record.batch.events:
            name = getattr(event, "request", "")
            # The number of tokens so far is not shown.
            if not name or isinstance(event, RequestCheckpoint):
                continue
            held = self._hold(name)
            held.edge = record.batch.writer
            held.events.append(Stamped(record.stored_ns, record.position, event))
            if isinstance(event, RequestStepped) and event.worker:
                self._instant(self._worker(event.worker), event, record.stored_ns)
            if isinstance(event, RequestEnded):
                self._write(name, self._held.pop(name), record.stored_ns)
                self._ended += 1

    def _hold(self, request: str) -> _Held:
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = _Held()
            if len(self._held) > OPEN_MAX:
                self._left_out += bool(self._held.pop(next(iter(self._held))).events)
        return held

    def close(self, end_ns: int) -> Exported:
        """Write the requests that are still open at the trace's end, and end it."""
        open_ = [(name, held) for name, held in self._held.items() if held.events]
        for name, held in open_:
            self._write(name, held, end_ns, is_open=True)
        self._writer.close()
        return Exported(self._ended, len(open_), self._writer.written, self._left_out)

    def _write(self, request: str, held: _Held, end_ns: int, *, is_open: bool = False) -> None:
        """Write a request: at its edge each choice with all its stages, and at the workers those of their stages."""
        edge = f"edge {held.edge}"
        self._writer.process(edge, EDGE_ORDER)
        spans = waterfall(held.events, held.decisions).spans
        arguments = _about(held.events, is_open=is_open)
        start_ns = held.events[0].time_ns
        for choice in sorted({span.choice for span in spans}) or [0]:
            choice_spans = [_ended(span, end_ns) for span in spans if span.choice == choice]
            name = f"{request} choice {choice}" if choice else request
            first_ns = min([start_ns, *(span.start_ns for span in choice_spans)])
            stages = tuple(_stage(span) for span in _apart(choice_spans))
            request_slice = Slice(name, "request", first_ns, end_ns, arguments, stages)
            self._writer.slices(edge, [request_slice], "requests")
            for worker, run in _runs(choice_spans):
                self._writer.slices(self._worker(worker), [_stage(span, request) for span in run], "requests")


def _about(events: list[Stamped], *, is_open: bool) -> dict[str, Any]:
    """What is shown of a request as a whole."""
    about: dict[str, Any] = {}
    for _, _, event in events:
        if isinstance(event, RequestAccepted):
            about |= fields_of(event, "model", "endpoint", "prompt_tokens", "max_tokens")
        elif isinstance(event, RequestEnded):
            about |= fields_of(event, "reason", "completion_tokens", "cached_tokens", "migrations", "ttft_ms")
            if event.error:
                about["error"] = event.error
    if not isinstance(events[0].event, RequestAccepted):
        about["began"] = "before the trace"
    return {**about, "state": "open at the trace's end"} if is_open else about


def _ended(span: Span, end_ns: int) -> Span:
    """The span with an end that is not before its start."""
    return msgspec.structs.replace(span, end_ns=max(span.start_ns, span.end_ns or end_ns))


def _apart(spans: list[Span]) -> Iterator[Span]:
    """The spans of a choice by their starts, each cut where it would overlap the one before."""
    free_ns = 0
    for span in sorted(spans, key=lambda entry: (entry.start_ns, entry.end_ns)):
        start_ns = max(span.start_ns, free_ns)
        free_ns = max(free_ns, span.end_ns)
        yield msgspec.structs.replace(span, start_ns=start_ns, end_ns=max(start_ns, span.end_ns))


def _runs(spans: list[Span]) -> Iterator[tuple[str, list[Span]]]:
    """The stages of a choice at workers, those that follow one another at one worker together."""
    run: list[Span] = []
    for span in _apart(spans):
        if run and span.worker != run[-1].worker:
            yield run[-1].worker, run
            run = []
        if span.worker:
            run.append(span)
    if run:
        yield run[-1].worker, run


def _stage(span: Span, request: str = "") -> Slice:
    """A stage as a slice; at a worker with the name of its request."""
    arguments: dict[str, Any] = {"stage": span.label, **span.detail}
    if request:
        arguments = {"request": request, "choice": span.choice, **arguments}
    elif span.worker:
        arguments = {"worker": span.worker, **arguments}
    if span.attempt:
        arguments["attempt"] = span.attempt
    if span.outcome:
        arguments["outcome"] = span.outcome
    name = span.name if request or not span.worker else f"{span.name} at {span.worker}"
    return Slice(name, span.name, span.start_ns, span.end_ns, arguments)


async def export(nats: NatsSettings, pool: str, output: str, start: str, end: str, *, as_json: bool) -> int:
    """Write the trace to a file, - for standard output, and say on standard error what is in it."""
    async with operator_ports(nats, "export") as ports:
        return await write(ports, await choose_pool(ports, pool), output, start, end, as_json=as_json)


async def write(
    ports: Ports, pool: str, output: str, start: str = "", end: str = "end", *, as_json: bool = False
) -> int:
    """See `export`. A file that was there is replaced once the trace is complete."""
    log = await open_log(ports, pool)
    first = await find_position(start, log, "--from") if start else await earliest(log)
    last = await find_position(end, log, "--to")
    if first >= last:
        raise ConfigError(f"--from is position {first} and --to is {last}: there is nothing between them")
    target, part = Path(output), Path(f"{output}.part")
    with ExitStack() as stack:
        try:
            file: BinaryIO = sys.stdout.buffer if output == "-" else stack.enter_context(part.open("wb"))
            exported = await _trace(ports, pool, log, first, last, file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    if output != "-":
        os.replace(part, target)
    _report(pool, exported, first, last, output, as_json=as_json)
    return 0


def _report(pool: str, exported: Exported, first: int, last: int, output: str, *, as_json: bool) -> None:
    if as_json:
        facts = {"pool": pool, "from": first, "to": last, "file": output, **exported._asdict()}
        print(msgspec.json.encode(facts).decode(), file=sys.stderr if output == "-" else sys.stdout)
        return
    left_out = f", {exported.left_out} left out" if exported.left_out else ""
    print(
        f"pool {pool}, positions {first} to {last}: {exported.ended} requests that ended, {exported.open} open ones{left_out}; "
        f"{exported.events} trace events in {output}: open it at https://ui.perfetto.dev",
        file=sys.stderr,
    )


async def _trace(ports: Ports, pool: str, log: PoolLog, first: int, last: int, file: BinaryIO) -> Exported:
    start_ns = await stored_at(log.log, first + 1) or log.now_ns()
    # At the log's end there may be later events of requests.
    is_end = last == (await log.log.bounds()).last
    end_ns = log.now_ns() if is_end else await stored_at(log.log, last) or log.now_ns()
    about = {"pool": pool, "from": first, "to": last, "start": iso_time(start_ns), "end": iso_time(end_ns)}
    exporter = Exporter(TraceWriter(file, start_ns, about))
    requests_first = await ports.requests.position_at(start_ns - 1)
    requests_last = await ports.requests.position_at(end_ns)
    subjects = tuple(pool_subject(ports.ns, pool, kind, ANY) for kind in KINDS)
    pool_records = _records(log.log, first, last, subjects, exporter.pool)
    requests_filter = (request_filter(ports.ns),)
    request_records = _records(
        ports.requests, requests_first, requests_last, requests_filter, exporter.request
    )
    with Progress("reading both logs") as progress:
        async for record, take in merged(
            (pool_records, request_records), lambda item: (item[0].stored_ns, item[1] == exporter.request)
        ):
            take(record)
            if take == exporter.pool:
                progress.at(record.position - first, last - first)
    return exporter.close(end_ns)


Take = Callable[[Record], None]


async def _records(
    log: Log, after: int, until: int, subjects: tuple[str, ...], take: Take
) -> AsyncIterator[tuple[Record, Take]]:
    """The readable messages of some subjects, each with what takes it."""
    async for run in scan_each(log, after, until, subjects):
        for message in run:
            if isinstance(message, Record):
                yield message, take
