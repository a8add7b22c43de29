"""The spans of requests: a tree that tells what the log's events do, the same one whoever makes it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headwater.actors.runtime.ports import Ports
from headwater.ops.history.request_spans import MS_NS, Stamped, at_edge
from headwater.ops.history.requests import StoredDecision
from headwater.ops.history.trace_spans import Trace, TraceSpan, spans_of
from headwater.ops.operator.explain import account
from headwater.ops.operator.trace import lines_of, trace_of
from headwater.ops.sim.fleet import POOL, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import (
    Event,
    RequestAccepted,
    RequestEncoded,
    RequestEnded,
    RequestPrefilled,
    RequestRouted,
    RequestStarted,
    RequestStepped,
)
from headwater.schemas.names import NO_TRACE, span_id
from headwater.schemas.routing import NO_CONSTRAINTS, NO_PREFERENCES, Candidate, Decision, Weights
from tests.support.worlds.told import ports_of, told
from tests.support.worlds.virtual import virtual

R, TRACE, PARENT = "chatcmpl-1", "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
T0 = 1_800_000_000_000_000_000


def life(*events: Event, late_ns: int = 7 * MS_NS) -> list[Stamped]:
    """Events as a log's server stores them: all of them at once, some milliseconds late."""
    return [Stamped(T0 + late_ns, 5 + number, event) for number, event in enumerate(events)]


def accepted(**fields: Any) -> RequestAccepted:
    """A request of the client's trace, which took 4 ms to prepare, 3 of them for its image."""
    known = {
        "trace": TRACE,
        "span": PARENT,
        "sampled": True,
        "began_ns": T0,
        "prepare_ms": 4.0,
        "media_ms": 3.0,
    }
    return RequestAccepted(R, "m", "chat", 100, 20, True, **{**known, **fields})


STEPS = (
    RequestEncoded(R, 0, f"{R}-0-1", "ab" * 16, 64, "computed", "e", 1, 2.0, after_ms=3.0),
    RequestRouted(R, 0, f"{R}-0-1", "p", 1, 0, "prefill", after_ms=3.5),
    RequestPrefilled(R, 0, "p", 1, "h1", 6.0, 30_000, after_ms=9.5),
    RequestRouted(R, 0, f"{R}-0-2", "d1", 1, 0, "decode", "h1", after_ms=10.0),
    RequestStarted(R, 0, "d1", 1, 16, 12.0),
    RequestStepped(R, 0, "decode", "lost", "routing", "d1", 1, "worker d1: killed", after_ms=15.0),
    RequestRouted(R, 0, f"{R}-0-3", "d2", 1, 3, after_ms=16.0),
    RequestEnded(R, "stop", 9, 16, 1, 12.0, 20.0),
)


def test_a_request_is_a_tree_of_what_each_process_did() -> None:
    """Below the client's span; a leg's span has the id that its worker was sent, and the leg that goes on links to the one that failed."""
    made = spans_of(R, "edge-0", life(accepted(), *STEPS), [])
    names = {span.span: span.name for span in made.spans}
    assert made.trace == TRACE
    found = [
        (span.name, span.service, span.instance, names.get(span.parent, span.parent), *_ms(span))
        for span in made.spans
    ]
    assert sorted(found[1:], key=lambda one: (one[4], -one[5])) == [
        ("prepare", "edge", "edge-0", "chat m", -4.0, 0.0),
        ("media", "edge", "edge-0", "prepare", -4.0, -1.0),
        ("route", "edge", "edge-0", "chat m", 0.0, 3.5),
        ("encode", "worker", "e", "chat m", 1.0, 3.0),
        ("prefill", "worker", "p", "chat m", 3.5, 9.5),
        ("handoff", "edge", "edge-0", "chat m", 9.5, 10.0),
        ("decode", "worker", "d1", "chat m", 10.0, 15.0),
        ("handoff", "worker", "d1", "decode", 10.0, 12.0),
        ("decode", "worker", "d1", "decode", 12.0, 15.0),
        ("migrate", "edge", "edge-0", "chat m", 15.0, 16.0),
        ("generate", "worker", "d2", "chat m", 16.0, 20.0),
        ("decode", "worker", "d2", "generate", 16.0, 20.0),
    ]
    assert found[0] == ("chat m", "edge", "edge-0", PARENT, -4.0, 20.0)
    lost, moved = span_id(TRACE, R, f"{R}-0-2"), span_id(TRACE, R, f"{R}-0-3")
    legs = {span.span: span for span in made.spans}
    assert legs[lost].error == "lost: worker d1: killed"
    assert (legs[moved].links, legs[moved].error) == ((lost,), "")


def _ms(span: TraceSpan) -> tuple[float, float]:
    return (span.start_ns - T0) / MS_NS, (span.end_ns - T0) / MS_NS


def test_attributes_say_what_the_conventions_and_the_log_have_names_for() -> None:
    """No prompt, no answer; a tenant only where it is asked for, and then as a digest."""
    events = life(accepted(tenant=7, payload="full", body=b"secret prompt"), *STEPS)
    events[-1] = Stamped(
        *events[-1][:2], msgspec.structs.replace(STEPS[-1], payload="full", answers=(b"secret",))
    )
    root, *others = spans_of(R, "edge-0", events, []).spans
    assert (
        root.attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.response.id": R,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.response.time_to_first_chunk": 0.012,
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 9,
            "gen_ai.usage.cache_read.input_tokens": 16,
            "headwater.migrations": 1,
            "headwater.log_position": 5,
            "headwater.log_position_end": 13,
        }.items()
    )
    assert [(event.name, event.time_ns - T0) for event in root.events] == [
        ("first token", 12 * MS_NS),
        ("failure", 15 * MS_NS),
    ]
    handoff = next(span for span in others if span.name == "handoff" and span.service == "edge")
    assert handoff.attributes.items() >= {"headwater.handoff": "h1", "headwater.lease_ms": 30_000}.items()
    text = msgspec.json.encode([root, *others])
    assert b"secret" not in text
    assert b"tenant" not in text


def test_names_of_the_conventions_exist() -> None:
    """Those that the installed package of the conventions has, in whatever state."""
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

    packages = gen_ai_attributes, error_attributes
    known = {one for each in packages for one in vars(each).values() if isinstance(one, str)}
    root, *_ = spans_of(
        R, "e", life(accepted(choices=2), *STEPS[:-1], RequestEnded(R, "error", 0, 0, 0, 1, 1, "x")), []
    ).spans
    ours = {name for name in root.attributes if not name.startswith("headwater.")}
    assert len(ours) > 10
    assert ours <= known


def test_events_without_times_are_placed_where_the_log_stored_them() -> None:
    """As older releases wrote them; and no event is before the one before it."""
    old = [Stamped(T0 + number, number, event) for number, event in enumerate((accepted(began_ns=0), *STEPS))]
    assert [one.time_ns - T0 for one in at_edge(old)] == list(range(9))
    mixed = [
        Stamped(T0 + 99 * MS_NS, 1, accepted()),
        Stamped(T0 + 1, 2, RequestStarted(R, 0, "w", 1, 0, 0.0)),
    ]
    assert [one.time_ns - T0 for one in at_edge(mixed)] == [0, 1]


def test_requests_that_fail_or_never_run_have_a_trace() -> None:
    """An error is the status of the whole; a request that is open says so; one whose edge died ends when another ended it."""
    failed = spans_of(R, "e", life(accepted(), RequestEnded(R, "error", 0, 0, 0, 0.0, 5.0, "no worker")), [])
    assert [(span.name, span.error) for span in failed.spans if span.error] == [("chat m", "no worker")]
    assert failed.spans[0].attributes["error.type"] == "error"
    open_ = spans_of(R, "e", life(accepted()), [])
    assert open_.spans[0].attributes["headwater.open"] is True
    left = spans_of(R, "e", life(accepted(), RequestEnded(R, "error", 0, 0, 0, 0.0, 0.0, "died")), [])
    assert _ms(left.spans[0]) == (-4.0, 7.0)
    assert spans_of(R, "e", life(STEPS[-1]), []).trace == NO_TRACE.trace_of(R)


async def traces_of(fleet: SimFleet) -> dict[str, tuple[Trace, list[Event]]]:
    """The trace and the events of each request of a fleet."""
    ports, names = ports_of(fleet), []
    async for piece in ports.requests.scan(0, 1 << 40):
        for record in piece.records:
            names += [one.request for one in record.batch.events if isinstance(one, RequestAccepted)]
    return {name: await _trace_of(ports, name) for name in names}


async def _trace_of(ports: Ports, name: str) -> tuple[Trace, list[Event]]:
    found = await account(ports, POOL, name)
    made = trace_of(name, found)
    assert made is not None
    return made, [one.event for one in found.life]


def check(name: str, made: Trace, events: Sequence[Event]) -> None:
    """A tree with one root, whose spans are the log's events."""
    ids = Counter(span.span for span in made.spans)
    assert max(ids.values()) == 1
    root, *others = made.spans
    assert (root.parent, root.is_request) == ("", True)
    assert {span.parent for span in others} <= ids.keys()
    assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in others)
    routed = {one.attempt: one.worker for one in events if isinstance(one, RequestRouted)}
    legs = {span.attributes.get("headwater.attempt"): span for span in others if span.parent == root.span}
    assert {span_id(made.trace, name, attempt): worker for attempt, worker in routed.items()} == {
        span.span: span.instance for span in legs.values() if span.service == "worker"
    }
    decided = [span.attributes["headwater.attempt"] for span in others if span.name == "decide"]
    assert {*decided} >= routed.keys()
    assert all(span.instance == "router-0" for span in others if span.name == "decide")
    failures = [one for one in events if isinstance(one, RequestStepped)]
    assert len(failures) == sum(event.name == "failure" for event in root.events)


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "prefill", "decode", "decode")])
@virtual
async def test_traces_of_a_fleet_with_failures_equal_its_log(clock: VirtualLoop, roles: Any) -> None:
    """Every request, migrated ones among them; and both the tree for people and a second reading give the same spans."""
    migrated = 0
    async with told(clock, roles) as fleet:
        traces = await traces_of(fleet)
        assert len(traces) == 48
        for name, (made, events) in traces.items():
            check(name, made, events)
            names = [span.name for span in made.spans]
            assert len(list(lines_of(made))) == 1 + len(names) + len(made.spans[0].events)
            migrated += any(span.links for span in made.spans)
            if roles[0] == "prefill":
                assert {"prefill", "decode"} <= {*names} or "generate" in names
        again = await traces_of(fleet)
        assert {name: made for name, (made, _) in again.items()} == {
            name: made for name, (made, _) in traces.items()
        }
    assert migrated


def routing(wall_ms: float) -> StoredDecision:
    """The decision that led to the prefill leg, at so many milliseconds of the router's clock."""
    scores = {"p": 1.5, "q": 4.0}
    decision = Decision(
        *(1, 40, 0, T0 + int(wall_ms * MS_NS), f"{R}-0-1", 100, 20, 6, 0, 0, 0),
        *(NO_CONSTRAINTS, NO_PREFERENCES, Weights(), 9, "p", 1),
        tuple(Candidate(name, 1, 2, 0, 0, 0, 0, score) for name, score in scores.items()),
        waited_ms=3,
    )
    return StoredDecision(("router-0", 1), 41, T0, decision)


@pytest.mark.parametrize(("wall_ms", "ends_ms"), [(2.0, 2.0), (-50.0, 0.0), (50.0, 3.5)])
def test_a_decision_is_below_the_wait_that_it_ends(wall_ms: float, ends_ms: float) -> None:
    """And the queue below the decision. The wait ends when it was decided, whatever the router's clock says beyond that."""
    events = life(accepted(prepare_ms=0.0), STEPS[1], RequestEnded(R, "stop", 9, 0, 0, 5.0, 20.0))
    made = spans_of(R, "e", events, [routing(wall_ms)])
    by_name = {span.name: span for span in made.spans}
    wait, decide, queue, leg = (by_name[name] for name in ("route", "decide", "queue", "prefill"))
    assert (decide.parent, queue.parent) == (wait.span, decide.span)
    assert (_ms(wait)[1], _ms(leg)[0]) == (ends_ms, ends_ms)
    assert decide.attributes.items() >= {"headwater.position": 40, "headwater.cost_margin": 2.5}.items()
    assert queue.attributes == {"headwater.waited_ms": 3}
