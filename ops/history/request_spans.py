"""One request as a waterfall: what each of its choices waited for, computed or transferred, on which worker, from when to when."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headwater.events.ports import Log
from headwater.ops.history.requests import Request
from headwater.schemas.events import (
    Event,
    RequestAccepted,
    RequestCheckpoint,
    RequestEncoded,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestStarted,
    RequestStepped,
)
from headwater.schemas.routing import Decision

SpanName = Literal["queue", "route", "encode", "prefill", "handoff", "decode"]

MS_NS: Final = 1_000_000


class Stamped(NamedTuple):
    """An event of the request log, when it was stored, and at which position."""

    time_ns: int
    position: int
    event: Event


class Span(msgspec.Struct):
    """A stage of a choice (-1: of the whole request) on a worker. `end_ns` is 0 while it runs; `outcome` says why it ended early."""

    name: SpanName
    label: str
    choice: int
    worker: str
    start_ns: int
    end_ns: int = 0
    attempt: str = ""
    outcome: str = ""
    detail: dict[str, Any] = {}


class PointMark(NamedTuple):
    """A moment of a request."""

    time_ns: int
    kind: Literal["accepted", "first token", "checkpoint", "failure", "ended"]
    text: str
    choice: int
    worker: str = ""


class Waterfall(NamedTuple):
    """The spans of a request in the order of their starts, and its marks."""

    spans: list[Span]
    marks: list[PointMark]


async def events_of(log: Log, row: Request, now_ns: int) -> list[Stamped]:
    """The events of a request up to a time. Those that its edge wrote for others are read too, so this takes as long as the request lasted."""
    until = row.end_position or (await log.bounds()).last
    return [
        Stamped(record.stored_ns, record.position, event)
        async for piece in log.scan(row.log_position - 1, until, [row.subject])
        for record in piece.records
        if record.stored_ns <= now_ns
        for event in record.batch.events
        if getattr(event, "request", None) == row.id
    ]


def at_edge(events: Sequence[Stamped]) -> list[Stamped]:
    """The same events at their times by their edge's clock, to the microsecond, where they say them; no event before the one before it.

    A log's server stores events in batches, some milliseconds after they happened.
    """
    stamped: list[Stamped] = []
    began_ns = 0
    for stored_ns, position, event in events:
        if isinstance(event, RequestAccepted):
            began_ns = time_ns = event.began_ns
        else:
            after_ms = _after_ms(event)
            time_ns = began_ns + int(after_ms * MS_NS) if began_ns and after_ms else 0
        earliest_ns = stamped[-1].time_ns if stamped else 0
        stamped.append(Stamped(max(time_ns or stored_ns, earliest_ns), position, event))
    return stamped


def _after_ms(event: Event) -> float:
    """How long after the acceptance of its request an event happened; 0 if it does not say so."""
    match event:
        case RequestRouted() | RequestEncoded() | RequestPrefilled() | RequestStepped():
            return event.after_ms
        case RequestStarted():
            return event.ttft_ms
        case RequestEnded():
            return event.duration_ms
        case _:
            return 0.0


def waterfall(events: Sequence[Stamped], decisions: Iterable[Decision]) -> Waterfall:
    """The stages of a request from its events, and from the decisions that were made for it."""
    return _Assembly({decision.request: decision for decision in decisions}).run(events)


class _Assembly:
    """Opens and closes the spans of a request's choices, event by event."""

    def __init__(self, decisions: dict[str, Decision]) -> None:
        self._decisions = decisions
        self._found = Waterfall([], [])
        self._open: dict[int, Span] = {}
        self._accepted_ns = 0

    def run(self, events: Sequence[Stamped]) -> Waterfall:
        for time_ns, _, event in events:
            match event:
                case RequestAccepted():
                    self._accept(event, time_ns)
                case RequestEncoded():
                    self._encode(event, time_ns)
                case RequestRouted():
                    self._route(event, time_ns)
                case RequestPrefilled():
                    self._close(event.choice, time_ns, {"prefill_ms": event.prefill_ms})
                    handoff_span = self._begin(
                        "handoff", "KV waits for its decode worker", event.choice, event.worker, time_ns
                    )
                    if event.handoff:
                        handoff_span.detail = {"handoff": event.handoff, "lease_ms": event.lease_ms}
                case RequestStarted():
                    self._start(event, time_ns)
                case RequestCheckpoint():
                    text = f"{event.emitted_tokens} tokens"
                    self._found.marks.append(PointMark(time_ns, "checkpoint", text, event.choice))
                case RequestStepped():
                    self._step(event, time_ns)
                case RequestEnded():
                    self._end(event, time_ns)
                case _:
                    pass
        self._found.spans.sort(key=lambda span: (span.start_ns, span.choice))
        return self._found

    def _accept(self, event: RequestAccepted, time_ns: int) -> None:
        self._accepted_ns = time_ns
        text = f"{event.endpoint}, {event.prompt_tokens} prompt tokens"
        self._found.marks.append(PointMark(time_ns, "accepted", text, -1))
        for choice in range(event.choices):
            self._begin("route", "waits for a worker", choice, "", time_ns)

    def _encode(self, event: RequestEncoded, time_ns: int) -> None:
        start_ns = time_ns - int(event.encode_ms * MS_NS)
        detail = {"outcome": event.outcome, "tokens": event.tokens, "reason": event.reason}
        span = Span(
            "encode", f"encodes {event.image}", event.choice, event.worker, start_ns, time_ns, event.attempt
        )
        span.detail = {name: value for name, value in detail.items() if value != ""}
        self._found.spans.append(span)

    def _route(self, event: RequestRouted, time_ns: int) -> None:
        decision = self._decisions.get(event.attempt)
        self._close(event.choice, time_ns)
        if decision is not None and decision.waited_ms:
            self._split_queue(event.choice, time_ns, decision.waited_ms)
        name: SpanName = "handoff" if event.leg == "decode" else "prefill"
        label = "receives KV" if event.leg == "decode" else "computes the prompt"
        if event.emitted_tokens and event.leg != "prefill":
            # There is no second event for the first token: what follows is the rest of the answer.
            name, label = "decode", f"continues after {event.emitted_tokens} tokens"
        span = self._begin(name, label, event.choice, event.worker, time_ns, event.attempt)
        span.detail = {"epoch": event.epoch, "emitted_tokens": event.emitted_tokens}
        if event.handoff:
            span.detail["handoff"] = event.handoff
        if decision is not None:
            chosen = decision.chosen
            span.detail |= {"cached_blocks": chosen.cached_blocks, "blocks": decision.blocks}
            if chosen.prefill_ms:
                span.detail |= {
                    "expected_queue_ms": chosen.queue_ms,
                    "expected_prefill_ms": chosen.prefill_ms,
                }

    def _split_queue(self, choice: int, time_ns: int, waited_ms: int) -> None:
        """Of the span that ended when a choice was dispatched, the router's queue is the last part before the decision."""
        route = next((span for span in reversed(self._found.spans) if span.choice == choice), None)
        if route is None or route.name != "route":
            return
        start_ns = max(route.start_ns, time_ns - waited_ms * MS_NS)
        route.end_ns = start_ns
        queue = Span("queue", "waits in the router's queue", choice, "", start_ns, time_ns)
        queue.detail = {"waited_ms": waited_ms}
        self._found.spans.append(queue)

    def _start(self, event: RequestStarted, time_ns: int) -> None:
        before = self._close(
            event.choice, time_ns, {"cached_tokens": event.cached_tokens} if event.cached_tokens >= 0 else {}
        )
        self._found.marks.append(
            PointMark(time_ns, "first token", f"after {event.ttft_ms:.1f} ms", event.choice, event.worker)
        )
        attempt = before.attempt if before is not None else ""
        self._begin("decode", "generates tokens", event.choice, event.worker, time_ns, attempt)

    def _step(self, event: RequestStepped, time_ns: int) -> None:
        span = self._close(event.choice, time_ns)
        if span is not None:
            span.outcome = f"{event.cause}: {event.reason}" if event.reason else event.cause
        text = f"{event.cause}: {event.reason}" if event.reason else event.cause
        self._found.marks.append(PointMark(time_ns, "failure", text, event.choice, event.worker))
        if event.after == "routing":
            self._begin("route", "waits for another worker", event.choice, "", time_ns)
        elif event.after != "ended":
            name: SpanName = "handoff" if event.after == "handoff" else "prefill"
            self._begin(name, f"goes on in {event.after}", event.choice, event.worker, time_ns)

    def _end(self, event: RequestEnded, time_ns: int) -> None:
        for choice in list(self._open):
            self._close(choice, time_ns)
        text = f"{event.reason}, {event.completion_tokens} tokens" + (
            f": {event.error}" if event.error else ""
        )
        self._found.marks.append(PointMark(time_ns, "ended", text, -1))

    def _begin(
        self, name: SpanName, label: str, choice: int, worker: str, time_ns: int, attempt: str = ""
    ) -> Span:
        self._close(choice, time_ns)
        span = self._open[choice] = Span(name, label, choice, worker, time_ns, attempt=attempt)
        self._found.spans.append(span)
        return span

    def _close(self, choice: int, time_ns: int, detail: dict[str, Any] | None = None) -> Span | None:
        span = self._open.pop(choice, None)
        if span is not None:
            span.end_ns = time_ns
            span.detail = {**span.detail, **(detail or {})}
        return span
