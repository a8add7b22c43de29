"""`headwater trace REQUEST`: the trace of a request that the log still holds, printed or sent to a receiver."""

import sys
from collections.abc import Iterator

import msgspec

from headwater.ops.config.sections import NatsSettings, Receiver
from headwater.ops.history.request_spans import Stamped
from headwater.ops.history.trace_spans import (
    OtlpSender,
    Trace,
    TraceSpan,
    Value,
    need_opentelemetry,
    spans_of,
)
from headwater.ops.nats.connect import choose_pool, operator_ports
from headwater.ops.operator.explain import Account, account
from headwater.ops.operator.log_reading import ID_FORM, check_id

SHOWN = (
    "headwater.attempt",
    "headwater.log_position",
    "headwater.position",
    "headwater.cached_blocks",
    "headwater.cost_margin",
    "headwater.cached_tokens",
    "headwater.waited_ms",
    "headwater.handoff",
    "headwater.outcome",
    "headwater.migrations",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
)
"""Attributes that a line for people has."""


async def trace(
    nats: NatsSettings, pool: str, request: str, receiver: Receiver | None, *, as_json: bool
) -> int:
    """Print the trace of a request, or send it. 1 if the log has none, or the receiver did not take it."""
    check_id(request)
    if receiver is not None:
        need_opentelemetry()
    async with operator_ports(nats, "trace") as ports:
        recorded = await account(ports, await choose_pool(ports, pool), request)
        request_trace = trace_of(request, recorded)
    if request_trace is None:
        print(
            f"no events of {request} in the request log; {ID_FORM}",
            file=sys.stderr,
        )
        return 1
    if as_json:
        print(
            msgspec.json.encode(
                {"trace": request_trace.trace, "state": request_trace.state, "spans": request_trace.spans}
            ).decode()
        )
    elif receiver is None:
        print("\n".join(lines_of(request_trace)))
    return _send(request_trace, receiver, ports.ns) if receiver is not None else 0


def trace_of(request: str, recorded: Account) -> Trace | None:
    """The trace of a request from what the logs have of it; None if that is nothing."""
    if not recorded.life:
        return None
    events = [Stamped(entry.stored_ns, entry.position, entry.event) for entry in recorded.life]
    return spans_of(request, recorded.life[0].edge, events, [entry.stored for entry in recorded.decisions])


def _send(request_trace: Trace, receiver: Receiver, ns: str) -> int:
    sender = OtlpSender(receiver, ns)
    try:
        failure = sender.send(sender.spans([request_trace]))
    finally:
        sender.close()
    where = f"{receiver.endpoint} ({receiver.protocol})"
    if failure:
        print(f"headwater: the trace was not sent to {where}: {failure}", file=sys.stderr)
        return 1
    print(f"sent trace {request_trace.trace}, {len(request_trace.spans)} spans, to {where}", file=sys.stderr)
    return 0


def lines_of(request_trace: Trace) -> Iterator[str]:
    """The spans as a tree for people: since when, how long, what, in which process."""
    first_ns = request_trace.spans[0].start_ns
    below: dict[str, list[TraceSpan]] = {}
    for span in request_trace.spans:
        below.setdefault(span.parent, []).append(span)
    yield f"trace {request_trace.trace}, {len(request_trace.spans)} spans; times in ms"
    before = f"{request_trace.spans[0].attributes['headwater.request']}-"

    def lines(span: TraceSpan, depth: int) -> Iterator[str]:
        began, took = (span.start_ns - first_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        about = ", ".join(
            f"{name.rpartition('.')[2]} {_text(span.attributes[name]).removeprefix(before)}"
            for name in SHOWN
            if name in span.attributes
        )
        failed = f"; failed: {span.error}" if span.error else ""
        name = f"{'  ' * depth}{span.name}"
        where = f"{span.service} {span.instance}"
        yield f"{began:10.3f} {took:10.3f}  {name:28} {where:18} {about}{failed}".rstrip()
        for child in sorted(below.get(span.span, ()), key=lambda child: (child.start_ns, -child.end_ns)):
            yield from lines(child, depth + 1)

    yield from lines(request_trace.spans[0], 0)
    for event in request_trace.spans[0].events:
        about = ", ".join(
            f"{name.rpartition('.')[2]} {_text(value)}" for name, value in event.attributes.items()
        )
        yield f"{(event.time_ns - first_ns) / 1e6:10.3f} {'':10}  {event.name}: {about}"


def _text(value: Value) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
