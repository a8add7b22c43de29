"""Which requests have their traces sent, and what is held of open ones."""

from typing import Any

import msgspec
import pytest

from headwater.ops import tracer
from headwater.ops.config.sections import TraceSettings
from headwater.ops.history.request_spans import Stamped
from headwater.ops.tracer import Ended, Gathering, reason_of
from headwater.schemas.events import Event, RequestAccepted, RequestCheckpoint, RequestEnded, RequestStarted
from headwater.schemas.names import NO_TRACE
from tests.support.data.examples import record

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NONE, SLOW = TraceSettings(sample=0.0), TraceSettings(sample=0.0, slow_s=2.0)
ENDED = RequestEnded("r", "stop", 5, 0, 0, 100.0, 9_000.0)


def accepted(request: str = "r", **fields: Any) -> RequestAccepted:
    return RequestAccepted(request, "m", "chat", 10, 20, True, **fields)


def reason(settings: TraceSettings, first: RequestAccepted, **end: Any) -> str:
    """Why the trace of a request is sent that ends so."""
    events = [Stamped(0, 1, first), Stamped(1, 2, msgspec.structs.replace(ENDED, **end))]
    return reason_of(events, settings)


def test_errors_migrations_and_slow_requests_always_are() -> None:
    """Whatever share is sampled, and whatever their client decided. Slow is one that is late with its first token, however long its answer takes."""
    plain = accepted(trace=TRACE, sampled=False)
    assert reason(SLOW, plain) == ""
    assert reason(SLOW, plain, reason="error") == "error"
    assert reason(SLOW, plain, migrations=1) == "migrated"
    assert reason(SLOW, plain, ttft_ms=2_000.0) == "slow"
    assert reason(SLOW, accepted(prepare_ms=1_950.0)) == "slow", "its media took so long"
    assert reason(SLOW, plain, ttft_ms=0.0) == "slow", "without a token, until its end"
    assert reason(NONE._replace(slow_s=0.0), plain, ttft_ms=1e9) == ""
    assert reason(SLOW, plain, reason="cancelled") == ""


def test_a_share_of_the_others_by_their_trace_ids() -> None:
    """The same requests in each run; a client's decision stands for its own trace."""
    settings = TraceSettings(sample=0.1, slow_s=0.0)
    names = [f"chatcmpl-{number}" for number in range(500)]
    taken = [name for name in names if reason(settings, accepted(name)) == "sampled"]
    assert taken == [name for name in names if NO_TRACE.is_sampled(name, 0.1)]
    assert 20 < len(taken) < 90
    assert reason(NONE, accepted(trace=TRACE, sampled=True)) == "sampled"
    assert reason(settings._replace(sample=1.0), accepted(trace=TRACE, sampled=False)) == ""


def taken(gathered: Gathering, position: int, *events: Event) -> list[Ended]:
    """The requests that a message of the request log ends."""
    return list(gathered.requests(record(position, *events, writer="edge-0")))


def test_requests_are_held_until_they_end() -> None:
    """From their acceptance on; how many tokens they have is no part of a trace. What began before is left alone."""
    gathered = Gathering(TraceSettings(sample=1.0))
    assert taken(gathered, 5, accepted("a"), RequestStarted("old", 0, "w", 1, 0, 1.0)) == []
    assert taken(gathered, 6, accepted("b"), RequestCheckpoint("a", 0, 64)) == []
    assert gathered.since(6) == 4, "to read the first one's events again after a restart"
    [ended] = taken(gathered, 7, msgspec.structs.replace(ENDED, request="a"))
    assert (ended.position, ended.reason, len(ended.held.events)) == (7, "sampled", 2)
    assert gathered.since(7) == 5
    assert taken(gathered, 8, msgspec.structs.replace(ENDED, request="old")) == []
    [(_, trace)] = gathered.finish([ended])
    assert trace.spans[0].attributes["headwater.request"] == "a"
    gathered.forget()
    assert (gathered.since(8), gathered.left_out) == (8, 1)


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest request is left out, and counted."""
    monkeypatch.setattr(tracer, "HELD_MAX", 3)
    gathered = Gathering(NONE)
    for number in range(5):
        taken(gathered, number + 1, accepted(str(number)))
    assert (gathered.left_out, gathered.since(5)) == (2, 2)
