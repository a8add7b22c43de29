"""One request as the spans of a trace: its waterfall as OpenTelemetry has it, and the way of spans to a receiver.

    POST … (edge)                                  the whole request, below the client's own span
    ├─ prepare (edge)                              from its body to its tokens
    │  └─ media (edge)                             fetched and decoded
    ├─ route, or migrate after a failure (edge)    waits for a worker
    │  └─ decide (router)
    │     └─ queue (router)
    ├─ encode (worker)                             an item of media
    ├─ prefill, decode, generate or compute (worker)   what one worker does of it: an engine's own spans are below this one
    │  ├─ prefill or handoff (worker)
    │  └─ decode (worker)
    └─ handoff (edge)                              its KV waits for a decode worker

Spans are a function of the logs' events, and their ids of names. So they are the same whoever makes them, and whenever. They contain no
prompts and no answers. OpenTelemetry's own tracers make spans as things happen, with ids of their choice. Here both are known beforehand,
so the exporters of its SDK are given what a tracer would give them.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from headwater import __version__
from headwater.ops.config.sections import Receiver
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.request_spans import MS_NS, Span, Stamped, at_edge, waterfall
from headwater.ops.history.requests import StoredDecision
from headwater.ops.terminal import fields_of
from headwater.schemas.events import (
    RequestAccepted,
    RequestEnded,
    RequestRouted,
    RequestStarted,
    RequestStepped,
)
from headwater.schemas.names import NO_TRACE, span_id

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

GEN_AI_SCHEMA: Final = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
"""The version of the GenAI conventions that the `gen_ai.*` attributes follow."""

OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""The conventions' names of operations, by endpoint; others are named after their endpoint."""

Service = Literal["edge", "router", "worker"]
Value = str | int | float | bool | list[str]


class SpanEvent(NamedTuple):
    """A moment of a span."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


class TraceSpan(msgspec.Struct, kw_only=True):
    """A span, whose ids are in hexadecimal. `service` and `instance` are the process that did it, `links` the ids of spans that it replaces.

    `error` says why it failed, "" if it did not. `is_request`: it stands for the whole request.
    """

    span: str
    parent: str
    name: str
    service: Service
    instance: str
    start_ns: int
    end_ns: int
    is_request: bool = False
    attributes: dict[str, Value] = {}
    events: list[SpanEvent] = []
    links: tuple[str, ...] = ()
    error: str = ""


class Trace(NamedTuple):
    """The spans of one request, the first of which is that of the whole request, under a trace id and with a `tracestate`."""

    trace: str
    state: str
    spans: list[TraceSpan]


def spans_of(request: str, edge: str, events: Sequence[Stamped], routings: Sequence[StoredDecision]) -> Trace:
    """The trace of a request from its events, of which there is at least one, and the decisions about it."""
    return _Assembly(request, edge, at_edge(events), routings).trace()


class _Assembly:
    """Makes the spans of one request."""

    def __init__(
        self, request: str, edge: str, events: list[Stamped], routings: Sequence[StoredDecision]
    ) -> None:
        self._request = request
        self._edge = edge
        self._events = events
        self._made = {entry.decision.request: entry for entry in routings}
        self._accepted = next(
            (entry.event for entry in events if isinstance(entry.event, RequestAccepted)), None
        )
        self._ended = next((entry.event for entry in events if isinstance(entry.event, RequestEnded)), None)
        self._routed = {
            entry.event.attempt: entry.event for entry in events if isinstance(entry.event, RequestRouted)
        }
        context = self._accepted.context if self._accepted is not None else NO_TRACE
        self._trace = context.trace_of(request)
        self._found = Trace(self._trace, context.state, [])
        self._root = self._id()
        self._parent = context.span
        self._end_ns = events[-1].time_ns

    def _id(self, *place: object) -> str:
        return span_id(self._trace, self._request, *place)

    def trace(self) -> Trace:
        self._add_request()
        self._add_preparation()
        shown = waterfall(self._events, [routing.decision for routing in self._made.values()])
        for choice in sorted({span.choice for span in shown.spans}):
            self._add_choice(choice, [span for span in shown.spans if span.choice == choice])
        return self._found

    def _add(
        self,
        place: Sequence[object],
        name: str,
        service: Service,
        instance: str,
        start_ns: int,
        end_ns: int,
        **more: Any,
    ) -> TraceSpan:
        span = TraceSpan(
            span=self._id(*place),
            parent=more.pop("parent", self._root),
            name=name,
            service=service,
            instance=instance,
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            **more,
        )
        self._found.spans.append(span)
        return span

    # The edge.

    def _add_request(self) -> None:
        accepted, ended = self._accepted, self._ended
        attributes: dict[str, Value] = {
            "headwater.request": self._request,
            "headwater.log_position": self._events[0].position,
            "headwater.gen_ai.schema": GEN_AI_SCHEMA,
            "gen_ai.response.id": self._request,
        }
        name, start_ns = "request", self._events[0].time_ns
        if accepted is not None:
            operation = OPERATIONS.get(accepted.endpoint, accepted.endpoint)
            name, start_ns = f"{operation} {accepted.model}", start_ns - int(accepted.prepare_ms * MS_NS)
            attributes |= self._about(accepted, operation)
        if ended is not None:
            attributes |= _outcome(ended, self._events[-1].position)
        else:
            attributes["headwater.open"] = True
        error = (ended.error or ended.reason) if ended is not None and ended.reason == "error" else ""
        self._add(
            *((), name, "edge", self._edge, start_ns, self._end_ns),
            parent=self._parent,
            is_request=True,
            attributes=attributes,
            events=list(self._moments()),
            error=error,
        )

    def _about(self, accepted: RequestAccepted, operation: str) -> dict[str, Value]:
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headwater",
            "gen_ai.request.model": accepted.model,
            "gen_ai.request.stream": accepted.stream,
            "gen_ai.usage.input_tokens": accepted.prompt_tokens,
            "headwater.endpoint": accepted.endpoint,
            "headwater.priority": accepted.priority,
        }
        if accepted.max_tokens:
            attributes["gen_ai.request.max_tokens"] = accepted.max_tokens
        if accepted.choices > 1:
            attributes["gen_ai.request.choice.count"] = accepted.choices
        if accepted.media:
            attributes["headwater.media"] = [place.kind for place in accepted.media]
        return attributes

    def _moments(self) -> Iterator[SpanEvent]:
        for time_ns, _, event in self._events:
            if isinstance(event, RequestStarted):
                yield SpanEvent("first token", time_ns, _named(fields_of(event, "choice", "worker")))
            elif isinstance(event, RequestStepped):
                fields = ("choice", "before", "cause", "after", "worker", "epoch", "reason")
                yield SpanEvent("failure", time_ns, _named(fields_of(event, *fields)))

    def _add_preparation(self) -> None:
        accepted = self._accepted
        if accepted is None or not accepted.prepare_ms:
            return
        end_ns = self._events[0].time_ns
        start_ns = end_ns - int(accepted.prepare_ms * MS_NS)
        prepare_span = self._add(("prepare",), "prepare", "edge", self._edge, start_ns, end_ns)
        if accepted.media_ms:
            media_ns = int(accepted.media_ms * MS_NS)
            self._add(
                *(("media",), "media", "edge", self._edge, start_ns, min(end_ns, start_ns + media_ns)),
                parent=prepare_span.span,
            )

    # What was done for one choice.

    def _add_choice(self, choice: int, spans: list[Span]) -> None:
        """Add the spans of a choice, in the order of their starts."""
        waits: list[Span] = []
        legs: list[list[Span]] = []
        encodings: list[Span] = []
        for span in spans:
            span.end_ns = span.end_ns or self._end_ns
            if span.name == "encode":
                encodings.append(span)
            elif span.name == "queue" and waits:
                waits[-1].end_ns = span.end_ns
            elif not span.attempt:
                waits.append(span)
            elif legs and legs[-1][0].attempt == span.attempt:
                legs[-1].append(span)
            else:
                legs.append([span])
        encoded = self._add_encodings(encodings)
        failed = ""
        for leg in legs:
            wait = next(
                (candidate for candidate in reversed(waits) if candidate.start_ns <= leg[0].start_ns), None
            )
            start_ns = self._dispatched_ns(leg[0], wait, encodings)
            added = self._add_leg(leg, start_ns, choice, failed)
            failed = added.span if added.error else ""
        self._add_waits(choice, waits, legs, encoded)

    def _dispatched_ns(self, leg: Span, wait: Span | None, encodings: list[Span]) -> int:
        """When a leg was sent: after it was decided, and after its media were encoded, and before its worker had it. The wait for it ends then."""
        known_ns = leg.start_ns
        routing = self._made.get(leg.attempt)
        if routing is None or wait is None:
            return known_ns
        # The clocks of a router and an edge differ.
        wait.end_ns = min(max(routing.decision.wall_ns, wait.start_ns), known_ns)
        return min(known_ns, max([wait.end_ns, *(e.end_ns for e in encodings if e.attempt == leg.attempt)]))

    def _add_leg(self, leg: list[Span], start_ns: int, choice: int, failed: str) -> TraceSpan:
        """Add the span of an attempt, and below it those of its stages."""
        first, last = leg[0], leg[-1]
        attempt, routed = first.attempt, self._routed[first.attempt]
        generates = self._accepted is None or self._accepted.max_tokens > 0
        attributes = {"choice": choice, "attempt": attempt, "leg": routed.leg, "worker": routed.worker}
        leg_span = self._add(
            *(
                (attempt,),
                routed.leg or ("generate" if generates else "compute"),
                "worker",
                routed.worker,
            ),
            *(start_ns, last.end_ns),
            attributes=_named({**attributes, **first.detail}),
            links=(failed,) if failed else (),
            error=last.outcome,
        )
        if len(leg) > 1 or not routed.leg:
            for number, stage in enumerate(leg if generates else ()):
                self._add(
                    *((attempt, number), stage.name, "worker", routed.worker),
                    *(stage.start_ns, stage.end_ns),
                    parent=leg_span.span,
                    attributes=_named(stage.detail) if number else {},
                    error=stage.outcome,
                )
        return leg_span

    def _add_encodings(self, encodings: list[Span]) -> dict[str, str]:
        """Add the spans of media that were encoded; returns them by the name of the decision that each followed."""
        span_ids: dict[str, str] = {}
        for attempt in dict.fromkeys(span.attempt for span in encodings):
            before = f"{attempt}-e"
            tries: dict[str, list[str]] = {}
            for name in self._made:
                if name.startswith(before):
                    tries.setdefault(name.removeprefix(before).partition("-")[0], []).append(name)
            groups = [tries[number] for number in sorted(tries, key=int)]
            attempt_spans = [span for span in encodings if span.attempt == attempt]
            for number, span in enumerate(attempt_spans):
                # An item for which no encode worker was there has no decision.
                names = groups[number] if len(groups) == len(attempt_spans) else []
                place = (names[-1],) if names else (attempt, "encode", number)
                added = self._add(
                    *(place, "encode", "worker" if span.worker else "edge", span.worker or self._edge),
                    *(span.start_ns, span.end_ns),
                    attributes=_named({"choice": span.choice, "attempt": attempt, **span.detail}),
                )
                span_ids |= dict.fromkeys(names, added.span)
        return span_ids

    def _add_waits(
        self, choice: int, waits: list[Span], legs: list[list[Span]], encoded: dict[str, str]
    ) -> None:
        """Add the times in which a choice was at no worker, and the decisions that were made then."""
        before = f"{self._request}-{choice}-"
        choice_routings = [routing for name, routing in self._made.items() if name.startswith(before)]
        choice_routings.sort(key=lambda routing: (routing.decision.wall_ns, routing.position))
        ids: list[str] = []
        for number, span in enumerate(waits):
            is_move = span.name == "route" and any(leg[0].start_ns < span.start_ns for leg in legs)
            name = "migrate" if is_move else span.name
            added = self._add(
                *(("wait", choice, number), name, "edge", self._edge, span.start_ns, span.end_ns),
                attributes=_named({"choice": choice, **span.detail}),
            )
            ids.append(added.span)
        for routing in choice_routings:
            during = [at for at, span in enumerate(waits) if span.start_ns <= routing.decision.wall_ns]
            near = ids[during[-1] if during else 0] if ids else self._root
            self._add_decision(routing, encoded.get(routing.decision.request, near))

    def _add_decision(self, routing: StoredDecision, parent: str) -> None:
        decision = routing.decision
        start_ns = decision.wall_ns - decision.waited_ms * MS_NS
        decided = self._add(
            *(
                ("decide", decision.request),
                "decide",
                "router",
                routing.router[0],
                start_ns,
                decision.wall_ns,
            ),
            parent=parent,
            attributes=_named(_reasons(routing)),
        )
        if decision.waited_ms:
            self._add(
                *(
                    ("queue", decision.request),
                    "queue",
                    "router",
                    routing.router[0],
                    start_ns,
                    decision.wall_ns,
                ),
                parent=decided.span,
                attributes=_named({"waited_ms": decision.waited_ms}),
            )


def _outcome(ended: RequestEnded, position: int) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "headwater.log_position_end": position,
        "headwater.migrations": ended.migrations,
        "gen_ai.response.finish_reasons": [ended.reason],
        "gen_ai.usage.output_tokens": ended.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": max(0, ended.cached_tokens),
    }
    if ended.ttft_ms:
        attributes["gen_ai.response.time_to_first_chunk"] = ended.ttft_ms / 1000
    if ended.reason in ("error", "cancelled"):
        attributes["error.type"] = ended.reason
    return attributes


def _reasons(routing: StoredDecision) -> dict[str, Any]:
    """What a decision was made of."""
    decision = routing.decision
    chosen = decision.chosen
    others = [candidate.score for candidate in decision.candidates if candidate is not chosen]
    return {
        "attempt": decision.request,
        "position": decision.position,
        "stored_position": routing.position,
        "worker": decision.worker,
        "epoch": decision.epoch,
        "leg": decision.leg,
        "policy": decision.preferences.policy,
        "candidates": decision.scored or len(decision.candidates),
        "blocks": decision.blocks,
        "cached_blocks": chosen.cached_blocks,
        "cost": round(chosen.score, 3),
        **({"cost_margin": round(min(others) - chosen.score, 3)} if others else {}),
        **({"expected_ttft_ms": round(chosen.ttft_ms, 3)} if chosen.prefill_ms else {}),
        **({"degraded": True} if decision.degraded else {}),
    }


def _named(fields: dict[str, Any]) -> dict[str, Value]:
    """Attributes of Headwater's own; empty texts are left out."""
    return {f"headwater.{name}": value for name, value in fields.items() if value != ""}


SCOPE: Final = "headwater"
EXTRA: Final = "otel"


def need_opentelemetry() -> None:
    """Raises `ConfigError` where OpenTelemetry's SDK and its exporters are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 (for its presence)
    except ImportError as error:
        raise ConfigError(
            f"sending traces needs OpenTelemetry, which is not installed ({error.name}): pip install 'headwater[{EXTRA}]'"
        ) from error


class OtlpSender:
    """Sends traces of a namespace to one receiver. Raises `ConfigError` where OpenTelemetry is not installed, or its variables are wrong."""

    def __init__(self, receiver: Receiver, ns: str) -> None:
        need_opentelemetry()
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.receiver = receiver
        self._ns = ns
        self._scope = InstrumentationScope(SCOPE, __version__, GEN_AI_SCHEMA)
        self._resources: dict[tuple[Service, str], Resource] = {}
        self._reasons = _Reasons()
        try:
            self._exporter = _exporter(receiver)
        except ValueError as error:
            raise ConfigError(f"{receiver.endpoint}: {error}") from error

    def spans(self, traces: Iterable[Trace]) -> list["ReadableSpan"]:
        """The spans of traces, as `send` takes them."""
        return [span for trace in traces for span in self._spans(trace)]

    def send(self, spans: Sequence["ReadableSpan"]) -> str:
        """Send spans; returns why that failed, "" if it did not. Blocks for as long as the exporter's time limit (10 s by default)."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        with self._reasons as reasons:
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return ""
        return reasons.first or "the receiver did not take them"

    def close(self) -> None:
        """End a `send` that waits, and all connections."""
        self._exporter.shutdown()

    def _spans(self, trace: Trace) -> Iterator["ReadableSpan"]:
        from opentelemetry.trace import TraceState

        state = TraceState.from_header([trace.state])
        services = {span.span: span.service for span in trace.spans}
        for span in trace.spans:
            # What another process asked for is the work of a server.
            yield self._span(span, trace.trace, state, serves=services.get(span.parent) != span.service)

    def _span(self, span: TraceSpan, trace: str, state: Any, *, serves: bool) -> "ReadableSpan":
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id, flags = int(trace, 16), TraceFlags(TraceFlags.SAMPLED)

        def context(id_: str, *, remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, int(id_, 16), remote, flags, state)

        return ReadableSpan(
            span.name,
            context(span.span),
            context(span.parent, remote=serves) if span.parent else None,
            self._resource(span.service, span.instance),
            dict(span.attributes),
            [Event(one.name, dict(one.attributes), one.time_ns) for one in span.events],
            [Link(context(id_)) for id_ in span.links],
            SpanKind.SERVER if serves else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _resource(self, service: Service, instance: str) -> "Resource":
        from opentelemetry.sdk.resources import Resource

        key = service, instance
        if key not in self._resources:
            self._resources[key] = Resource.create(
                {
                    "service.name": f"headwater-{service}",
                    "service.namespace": self._ns,
                    "service.instance.id": instance,
                    "service.version": __version__,
                }
            )
        return self._resources[key]


def _exporter(receiver: Receiver) -> Any:
    if receiver.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=receiver.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=receiver.endpoint)


class _Reasons(logging.Handler):
    """Takes what the exporters log in place of an exception, which names the cause, and keeps it from the log of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        self._logger = logging.getLogger("opentelemetry.exporter")

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        self.first = self.first or record.getMessage()

    def __enter__(self) -> "_Reasons":
        self.first = ""
        self._logger.propagate = False
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
