"""The tracer: sends the traces of requests that have ended to a receiver, from the logs.

It only reads: nothing that serves requests knows of it or waits for it.

Subjects in
    the request log; the pools' logs (decisions)
State
    the open requests and their decisions, bounded; a file with the position that was reached
On lag
    reads on; the logs keep what it has not read
On a receiver that cannot be reached
    waits, and reads no further: nothing is lost while the logs hold it. Spans that a reachable receiver refuses for `REFUSED_S` are dropped (counted)
On loss of the log
    waits
On a gap in the log
    requests whose events are missing are left out (counted)
On start
    from the position of its file, without one from the log's end. Requests that were sent but not noted are sent again, with the same ids
On stop
    ends at once; the next one goes on from there
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from headwater.actors import metrics
from headwater.actors.runtime.actor import Actor
from headwater.actors.runtime.ports import Ports
from headwater.events.ports import Log, LogError, Record
from headwater.ops.config.processes import TracerProcess
from headwater.ops.config.sections import TraceSettings, receiver_of
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.request_spans import Stamped
from headwater.ops.history.requests import StoredDecision, decisions_in, request_of
from headwater.ops.history.trace_spans import OtlpSender, Trace, need_opentelemetry, spans_of
from headwater.ops.start.actor import Host, run_one
from headwater.schemas.events import RequestAccepted, RequestCheckpoint, RequestEnded
from headwater.schemas.subjects import ANY, pool_subject

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

HELD_MAX: Final = 20_000
"""Open requests, and requests of which only decisions are known, that are held each; beyond, the oldest is left out."""

Reason = Literal["", "sampled", "error", "migrated", "slow"]
"""Why the trace of a request is sent; "": it is not."""


class Held(msgspec.Struct):
    """An open request: its edge and its events so far."""

    request: str
    edge: str
    events: list[Stamped]

    @property
    def position(self) -> int:
        """Where its events begin in the request log."""
        return self.events[0].position


class Ended(NamedTuple):
    """A request that has ended, at this position of the request log, and why its trace is sent."""

    held: Held
    position: int
    reason: Reason


class Gathering:
    """The open requests, and the decisions about them. `left_out` counts requests that were open for too long."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._open: dict[str, Held] = {}
        self._decisions: dict[str, list[StoredDecision]] = {}
        self.left_out = 0

    def requests(self, record: Record) -> Iterator[Ended]:
        """Take a message of the request log; yields the requests that it ends."""
        for event in record.batch.events:
            # The number of tokens so far is no part of a trace.
            if isinstance(event, RequestCheckpoint):
                continue
            name = getattr(event, "request", "")
            stamped = Stamped(record.stored_ns, record.position, event)
            if isinstance(event, RequestAccepted):
                self._open[name] = Held(name, record.batch.writer, [stamped])
                self.left_out += _bound(self._open)
            elif (held := self._open.get(name)) is not None:
                held.events.append(stamped)
                if isinstance(event, RequestEnded):
                    del self._open[name]
                    yield Ended(held, record.position, reason_of(held.events, self._settings))

    def routes(self, record: Record) -> None:
        """Take a message of a pool's log."""
        for routing in decisions_in(record):
            self._decisions.setdefault(request_of(routing.decision.request), []).append(routing)
        _bound(self._decisions)

    def finish(self, ended: Iterable[Ended]) -> list[tuple[Ended, Trace]]:
        """The traces of those whose traces are sent. What is held for any of them is given up."""
        traces = []
        for ended_request in ended:
            held = ended_request.held
            routings = self._decisions.pop(held.request, [])
            if ended_request.reason:
                trace = spans_of(held.request, held.edge, held.events, routings)
                traces.append((ended_request, trace))
        return traces

    def since(self, position: int) -> int:
        """The position after which all events of open requests are, given that up to which the log was read."""
        return next(iter(self._open.values())).position - 1 if self._open else position

    def forget(self) -> None:
        """Give up all open requests: a part of the log is missing."""
        self.left_out += len(self._open)
        self._open.clear()


def _bound(held: dict[str, Held] | dict[str, list[StoredDecision]]) -> int:
    """Drop the oldest beyond `HELD_MAX`; returns how many."""
    excess = len(held) - HELD_MAX
    for _ in range(excess):
        held.pop(next(iter(held)))
    return max(0, excess)


def reason_of(events: list[Stamped], settings: TraceSettings) -> Reason:
    """Why the trace of a request that was accepted and has ended is sent."""
    accepted, ended = events[0].event, events[-1].event
    assert isinstance(accepted, RequestAccepted)
    assert isinstance(ended, RequestEnded)
    if ended.reason == "error":
        return "error"
    if ended.migrations:
        return "migrated"
    if (
        settings.slow_s
        and accepted.prepare_ms + (ended.ttft_ms or ended.duration_ms) >= settings.slow_s * 1000
    ):
        return "slow"
    return "sampled" if accepted.context.is_sampled(accepted.request, settings.sample) else ""


POLL_S: Final = 0.5
"""How often a log that has nothing new is asked again."""

READ_MAX: Final = 1_000
"""Messages of the request log that are read before the pools' logs are read up to their time, and what has ended is sent."""

POOLS_S: Final = 10.0
"""How often the list of pools is read."""

APART_NS: Final = 10_000_000_000
"""How far apart the two logs may have stored what belongs together."""

SEND_MAX: Final = 512
"""Spans of one message to the receiver."""

RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 30.0
"""Pauses between two attempts to send, doubled from the first value to the last."""

REFUSED_S: Final = 300.0
"""How long spans are offered to a receiver that can be reached and does not take them."""


class Place(msgspec.Struct, frozen=True):
    """Where a tracer is in the request log with the identity `log`: requests that ended up to `done` were sent, and events of open ones
    are after `since`.
    """

    log: str
    since: int
    done: int


class Tracer(Actor):
    """See the module. `file` keeps its place; its folder exists."""

    kind = "tracer"

    def __init__(
        self, ports: Ports, name: str, settings: TraceSettings, sender: OtlpSender, file: Path
    ) -> None:
        super().__init__(ports, name)
        self._sender = sender
        self._file = file
        self._gathering = Gathering(settings)
        self._log_name = ""
        self._read = self._done = 0
        self._saved: Place | None = None
        self._pools: dict[str, tuple[Log, int]] = {}
        self._pools_s = -POOLS_S
        self._horizon_ns = 0
        self._is_down = False
        self._sent: Counter[str] = Counter()

    def stats(self) -> dict[str, Any]:
        """See `Actor.stats`."""
        state = "receiver unavailable" if self._is_down else "ready" if self.ready.is_set() else "starting"
        return {
            "state": state,
            "receiver": self._sender.receiver.endpoint,
            "position": self._read,
            "sent": dict(self._sent),
        }

    async def start(self) -> None:
        """See `Actor.start`."""
        await self._find_place()
        # What ends from now on is this tracer's, however soon it dies.
        self._save()
        self.spawn(self._follow(), "follow")
        self.log.info("tracer_started", receiver=self._sender.receiver.endpoint, position=self._read)

    async def drain(self) -> None:
        """See `Actor.drain`. What was not sent is sent by the next one."""
        self._sender.close()

    async def close(self) -> None:
        """See `Actor.close`."""

    async def _find_place(self) -> None:
        log = self.ports.requests
        self._log_name, bounds = await log.identity(), await log.bounds()
        place = self._load()
        if place is None:
            self._read = self._done = bounds.last
        elif place.log != self._log_name:
            # Another log of the same name: all of it is new.
            self._read = self._done = bounds.first - 1
        else:
            self._read, self._done = place.since, place.done

    def _load(self) -> Place | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Place)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            self.log.warning("tracer_place_unreadable", file=str(self._file), reason=str(error))
            return None

    def _save(self) -> None:
        place = Place(self._log_name, self._gathering.since(self._read), self._done)
        if place == self._saved:
            return
        part = self._file.with_name(f"{self._file.name}.part")
        try:
            part.write_bytes(msgspec.json.encode(place))
            os.replace(part, self._file)
        except OSError as error:
            self.log.warning("tracer_place_not_saved", file=str(self._file), reason=str(error))
            return
        self._saved = place

    # The logs.

    async def _follow(self) -> None:
        """Read on until cancelled."""
        while True:
            try:
                progressed = await self._step()
            except LogError as error:
                if not error.retryable:
                    raise
                self.log.warning("tracer_log_unavailable", reason=str(error))
                progressed = False
            if not progressed:
                await self.ports.clock.sleep(POLL_S)

    async def _step(self) -> bool:
        """Read a part of the request log, what the pools' logs have up to then, and send what has ended. False if there was nothing."""
        log = self.ports.requests
        bounds = await log.bounds()
        metrics.TRACER_LAG.set(max(0, bounds.last - self._read))
        if bounds.last < self._read:
            if await log.identity() != self._log_name:
                self._gathering.forget()
                await self._find_place()
            return False
        if self._read < bounds.first - 1:
            self._note_gap(bounds.first - 1)
        until = min(bounds.last, self._read + READ_MAX)
        if until <= self._read:
            return False
        ended: list[Ended] = []
        async for piece in log.scan(self._read, until):
            for record in piece.records:
                self._horizon_ns = max(self._horizon_ns, record.stored_ns)
                if not self._pools:
                    await self._find_pools(record.stored_ns)
                ended += self._gathering.requests(record)
        self._read = until
        # A decision is stored before the request that it is about ends.
        await self._read_pools()
        await self._finish([ended_request for ended_request in ended if ended_request.position > self._done])
        self._done = max(self._done, until)
        metrics.TRACER_LEFT_OUT.set(self._gathering.left_out)
        self._save()
        return True

    def _note_gap(self, until: int) -> None:
        self.log.warning("tracer_log_gap", first=self._read + 1, last=until)
        metrics.TRACER_GAPS.inc()
        self._gathering.forget()
        self._read = until

    async def _find_pools(self, from_ns: int) -> None:
        """Begin to follow the pools that are not followed yet, a little before a time."""
        self._pools_s = self.ports.clock.monotonic_s()
        for pool in await self.ports.pool_logs() if self.ports.pool_logs is not None else ():
            if pool not in self._pools:
                log = await self.ports.pool_log(pool)
                self._pools[pool] = log, await log.position_at(from_ns - APART_NS)

    async def _read_pools(self) -> None:
        if self.ports.clock.monotonic_s() - self._pools_s >= POOLS_S:
            await self._find_pools(self._horizon_ns)
        for pool, (log, read) in list(self._pools.items()):
            last = (await log.bounds()).last
            if last < read:
                # Its log was made anew.
                del self._pools[pool]
                continue
            if last > read + READ_MAX:
                # After an absence the logs are read side by side, so that few decisions are held.
                last = max(read, await log.position_at(self._horizon_ns + APART_NS))
            async for piece in log.scan(read, last, [pool_subject(self.ports.ns, pool, "route", ANY)]):
                for record in piece.records:
                    self._gathering.routes(record)
            self._pools[pool] = log, last

    # The receiver.

    async def _finish(self, ended: Sequence[Ended]) -> None:
        traces = self._gathering.finish(ended)
        for ended_request in ended:
            metrics.TRACER_REQUESTS.labels(ended_request.reason or "left out").inc()
        spans = self._sender.spans(trace for _, trace in traces)
        for first in range(0, len(spans), SEND_MAX):
            await self._send(spans[first : first + SEND_MAX])
        self._sent.update(ended_request.reason for ended_request, _ in traces)
        self.requests.total += len(traces)

    async def _send(self, spans: Sequence["ReadableSpan"]) -> None:
        """Send spans, however long it takes, unless a receiver that can be reached refuses them."""
        clock, pause_s = self.ports.clock, RETRY_S
        refused_since_s: float | None = None
        while reason := await asyncio.to_thread(self._sender.send, spans):
            metrics.TRACER_FAILURES.inc()
            if not self._is_down:
                self._is_down = True
                self.log.warning("traces_not_sent", receiver=self._sender.receiver.endpoint, reason=reason)
            if not await self._is_reachable():
                refused_since_s = None
            elif refused_since_s is None:
                refused_since_s = clock.monotonic_s()
            elif clock.monotonic_s() - refused_since_s >= REFUSED_S:
                self.log.error("traces_dropped", spans=len(spans), reason=reason)
                metrics.TRACER_SPANS.labels("dropped").inc(len(spans))
                return
            await clock.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)
        if self._is_down:
            self._is_down = False
            self.log.info("traces_sent_again", receiver=self._sender.receiver.endpoint)
        metrics.TRACER_SPANS.labels("sent").inc(len(spans))

    async def _is_reachable(self) -> bool:
        """Does the receiver accept connections?"""
        try:
            async with asyncio.timeout(RETRY_S):
                _, writer = await asyncio.open_connection(*self._sender.receiver.address)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


NICENESS: Final = 10
"""By how much the process lowers its priority: what serves requests goes first, and the logs keep what waits."""


async def run(settings: TracerProcess, stop: asyncio.Event) -> int:
    """Run the tracer until stopped. Raises `ConfigError`."""
    trace_settings, name = settings.trace, settings.name or "tracer"
    if not trace_settings.otlp:
        raise ConfigError("give the URL of the receiver with --otlp")
    need_opentelemetry()
    receiver, folder = receiver_of(trace_settings.otlp), Path(settings.data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder} cannot be used: {error.strerror or error}") from error
    os.nice(NICENESS)

    async def make(ports: Ports) -> Actor:
        return Tracer(ports, name, trace_settings, OtlpSender(receiver, ports.ns), folder / f"{name}.json")

    return await run_one(Host(settings.nats, settings.metrics), "tracer", name, make, stop)
