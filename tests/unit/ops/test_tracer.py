"""The tracer against a real receiver: what ended is sent, once while all goes well, and at least once whatever does not."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headwater.actors import metrics
from headwater.actors.runtime.ports import Ports
from headwater.events.memory import MemoryLog
from headwater.ops import tracer as module
from headwater.ops.config.sections import TraceSettings, receiver_of
from headwater.ops.history.trace_spans import OtlpSender
from headwater.ops.operator.explain import account
from headwater.ops.operator.trace import trace_of
from headwater.ops.start.sockets import free_port
from headwater.ops.tracer import Place, Tracer
from headwater.schemas.clock import SystemClock
from headwater.schemas.events import RequestAccepted, RequestEnded, RequestRouted, RequestStarted
from headwater.schemas.names import NO_TRACE
from tests.support.data.queries import route_query
from tests.support.servers.otlp import Received, otlp_receiver
from tests.support.worlds.clock import running, settle
from tests.support.worlds.told_fleet import ToldFleet, told_fleet

ALL = TraceSettings(sample=1.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that are short, in place of many seconds."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    for name in ("POLL_S", "RETRY_S", "RETRY_S_MAX"):
        monkeypatch.setattr(module, name, 0.02)


@pytest.fixture
async def told() -> ToldFleet:
    """A fleet with two workers, whose logs a test tells."""
    fleet = await told_fleet()
    await fleet.join("w1", "w2")
    return fleet


def reading(told: ToldFleet) -> Ports:
    """The ports of a process that reads these logs."""

    async def pools() -> list[str]:
        return ["p"]

    return told.ports._replace(clock=SystemClock(), pool_logs=pools)


async def begin(told: ToldFleet, name: str) -> None:
    """A request is accepted, and routed."""
    decision = await told.decide(route_query(f"{name}-0-1"))
    routed = RequestRouted(name, 0, f"{name}-0-1", decision.worker, decision.epoch, 0, after_ms=1.0)
    await told.tell_request(
        RequestAccepted(name, "m", "chat", 16, 20, True, began_ns=told.ports.clock.wall_ns()), routed
    )


async def end(told: ToldFleet, name: str) -> None:
    """It gets its first token, and ends."""
    await told.tell_request(
        RequestStarted(name, 0, "w1", 1, 0, 2.0), RequestEnded(name, "stop", 5, 0, 0, 2.0, 9.0)
    )


async def serve(told: ToldFleet, *names: str) -> None:
    """Whole requests."""
    for name in names:
        await begin(told, name)
        await end(told, name)


@asynccontextmanager
async def tracing(
    told: ToldFleet, url: str, file: Path, settings: TraceSettings = ALL
) -> AsyncIterator[Tracer]:
    """A tracer that runs until the end of the block."""
    ports = reading(told)
    tracer = Tracer(ports, "tracer-0", settings, OtlpSender(receiver_of(url), ports.ns), file)
    async with running(tracer.run()) as run:
        await tracer.ready.wait()
        yield tracer
        tracer.stop()
        await run
    assert tracer.unexpected == []


def arrived(wanted: Counter[str], times: int = 1) -> Callable[[Received], bool]:
    """Have these spans arrived, so often?"""
    return lambda received: all(ids(received.spans)[span] >= times for span in wanted)


def ids(spans: Iterable[Span]) -> Counter[str]:
    return Counter(span.span_id.hex() for span in spans)


async def in_log(told: ToldFleet, *names: str) -> Counter[str]:
    """The spans that `headwater trace` makes of these requests."""
    found: Counter[str] = Counter()
    for name in names:
        made = trace_of(name, await account(reading(told), "p", name))
        assert made is not None
        found.update(span.span for span in made.spans)
    return found


async def noted(told: ToldFleet, file: Path) -> None:
    """Wait until the tracer has sent, and noted as sent, all that ended so far."""
    last = (await told.ports.requests.bounds()).last
    while msgspec.json.decode(file.read_bytes(), type=Place).done != last:
        await SystemClock().sleep(0.01)


async def test_what_ends_is_sent_as_the_log_has_it(told: ToldFleet, tmp_path: Path) -> None:
    """The same spans that are made of the log afterwards, with times and attributes; nothing of what ended before it began to follow."""
    await serve(told, "before")
    async with otlp_receiver() as received, tracing(told, received.url, tmp_path / "place"):
        await serve(told, "a", "b")
        await received.until(arrived(await in_log(told, "a", "b")))
    assert ids(received.spans) == await in_log(told, "a", "b")
    made = trace_of("a", await account(reading(told), "p", "a"))
    assert made is not None
    got = {span.span_id.hex(): span for span in received.of(made.trace)}
    for wanted in made.spans:
        span = got[wanted.span]
        assert (span.name, span.parent_span_id.hex()) == (wanted.name, wanted.parent)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (wanted.start_ns, wanted.end_ns)
        assert {one.key for one in span.attributes} == wanted.attributes.keys()
    assert {span.name for span in got.values()} >= {
        "chat m",
        "route",
        "decide",
        "generate",
        "prefill",
        "decode",
    }


async def test_only_what_is_asked_for_is_sent(told: ToldFleet, tmp_path: Path) -> None:
    """A share of 0 leaves the failed one."""
    none = TraceSettings(sample=0.0)
    async with otlp_receiver() as received, tracing(told, received.url, tmp_path / "place", none) as tracer:
        await serve(told, "a")
        await begin(told, "b")
        await told.tell_request(RequestEnded("b", "error", 0, 0, 0, 0.0, 3.0, "no worker"))
        await received.until(arrived(await in_log(told, "b")))
        await noted(told, tmp_path / "place")
    assert tracer.stats()["sent"] == {"error": 1}
    assert ids(received.spans) == await in_log(told, "b")


async def test_a_receiver_that_is_down_loses_nothing(told: ToldFleet, tmp_path: Path) -> None:
    """What ends meanwhile stays in the log, and is sent once the receiver is there."""
    port = free_port(0)
    async with tracing(told, f"http://127.0.0.1:{port}", tmp_path / "place") as tracer:
        await serve(told, "a")
        while tracer.stats()["state"] != "receiver unavailable":
            await SystemClock().sleep(0.01)
        reached = tracer.stats()["position"]
        await serve(told, "b", "c")
        await settle()
        assert tracer.stats()["position"] == reached, "nothing piles up in memory"
        async with otlp_receiver(port) as received:
            await received.until(arrived(await in_log(told, "a", "b", "c")))
    assert ids(received.spans) == await in_log(told, "a", "b", "c")


async def test_a_tracer_that_is_started_again_goes_on(told: ToldFleet, tmp_path: Path) -> None:
    """With what ended while there was none, and with the whole of what was open; what was sent is not sent again."""
    file = tmp_path / "place"
    async with otlp_receiver() as received:
        async with tracing(told, received.url, file):
            await begin(told, "open")
            await serve(told, "a")
            await noted(told, file)
        await serve(told, "b")
        await end(told, "open")
        before = file.read_bytes()
        async with tracing(told, received.url, file):
            await received.until(arrived(await in_log(told, "b", "open")))
            await noted(told, file)
        once = await in_log(told, "open", "a", "b")
        assert ids(received.spans) == once
        # As if it had died between sending and noting it.
        file.write_bytes(before)
        async with tracing(told, received.url, file):
            await received.until(arrived(await in_log(told, "open", "b"), times=2))
    assert ids(received.spans).keys() == once.keys()


async def test_what_a_receiver_refuses_is_dropped_in_the_end(
    told: ToldFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be reached, and does not take it: what follows is not held up for ever."""
    monkeypatch.setattr(module, "REFUSED_S", 0.0)
    async with (
        otlp_receiver() as received,
        tracing(told, f"{received.url}/elsewhere", tmp_path / "place") as tracer,
    ):
        await serve(told, "a")
        last = (await told.ports.requests.bounds()).last
        while tracer.stats()["position"] != last or tracer.stats()["sent"] != {"sampled": 1}:
            await SystemClock().sleep(0.01)
    assert received.spans == []


async def test_a_place_in_another_log_is_its_beginning(told: ToldFleet, tmp_path: Path) -> None:
    """A log that was made anew is all new; an unreadable place is none."""
    file = tmp_path / "place"
    await serve(told, "a")
    file.write_text('{"log": "another", "since": 99, "done": 99}')
    async with otlp_receiver() as received:
        async with tracing(told, received.url, file):
            await received.until(arrived(await in_log(told, "a")))
        file.write_text("{")
        async with tracing(told, received.url, file):
            await serve(told, "b")
            await received.until(arrived(await in_log(told, "b")))
    assert ids(received.spans) == await in_log(told, "a", "b")


async def test_a_gap_costs_the_requests_in_it(told: ToldFleet, tmp_path: Path) -> None:
    """A part of the log was removed before it was read: what was open then is left out, and what follows is sent."""
    log = told.ports.requests
    assert isinstance(log, MemoryLog)
    port, gaps = free_port(0), metrics.TRACER_GAPS._value.get()
    async with tracing(told, f"http://127.0.0.1:{port}", tmp_path / "place") as tracer:
        await begin(told, "open")
        await serve(told, "a")
        while tracer.stats()["state"] != "receiver unavailable":
            await SystemClock().sleep(0.01)
        wanted = await in_log(told, "a")
        await serve(told, "gone")
        log.purge((await log.bounds()).last + 1)
        await end(told, "open")
        await serve(told, "b")
        wanted += await in_log(told, "b")
        async with otlp_receiver(port) as received:
            await received.until(arrived(wanted))
            await noted(told, tmp_path / "place")
    assert ids(received.spans) == wanted
    assert metrics.TRACER_GAPS._value.get() == gaps + 1


async def test_a_log_that_is_made_anew_is_followed(told: ToldFleet, tmp_path: Path) -> None:
    """From its beginning; what was open in the old one will never end."""
    log = told.ports.requests
    assert isinstance(log, MemoryLog)
    async with otlp_receiver() as received, tracing(told, received.url, tmp_path / "place"):
        await begin(told, "open")
        await serve(told, "a")
        await noted(told, tmp_path / "place")
        log.replace()
        while msgspec.json.decode((tmp_path / "place").read_bytes(), type=Place).log != await log.identity():
            await serve(told, "b")
            await SystemClock().sleep(0.05)
        await received.until(lambda got: bool(got.of(NO_TRACE.trace_of("b"))))
    assert not received.of(NO_TRACE.trace_of("open"))
