"""`headwater export --perfetto`: the trace of a fleet, by what a viewer relies on."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.events.memory import MemoryLog
from headwater.events.ports import LogUnavailable
from headwater.ops.commands.application import main
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug import export as module
from headwater.ops.debug.export import Slice, TraceWriter, write
from headwater.ops.sim.fleet import POOL, SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.schemas.events import (
    RequestAccepted,
    RequestEnded,
    RequestRouted,
    RequestStarted,
    RequestStepped,
    Role,
    WorkerJoined,
)
from tests.support.data.queries import route_query
from tests.support.worlds.told import ports_of, told
from tests.support.worlds.told_fleet import ToldFleet, clock_of, told_fleet
from tests.support.worlds.virtual import virtual

Capture = pytest.CaptureFixture[str]
Event = dict[str, Any]

ROUNDING = 0.002
"""Microseconds."""


def read(path: Path) -> list[Event]:
    """The events of a trace, after checks of what a viewer relies on."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ph"] in "MXCi"
        assert event["ph"] == "M" or event["ts"] >= 0
    _check_lanes([event for event in events if event["ph"] == "X"])
    counters: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "C":
            assert event["ts"] >= counters[event["pid"], event["name"]]
            counters[event["pid"], event["name"]] = event["ts"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named == {event["pid"] for event in events}
    return events


def _check_lanes(slices: Sequence[Event]) -> None:
    """In each lane slices start in the order in which they are written, and either do not overlap or lie within one another."""
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in slices:
        assert event["dur"] >= 0
        lanes[event["pid"], event["tid"]].append(event)
    for several in lanes.values():
        around: list[float] = []
        last = 0.0
        for event in several:
            start, end = event["ts"], event["ts"] + event["dur"]
            assert start >= last
            last = start
            while around and around[-1] <= start + ROUNDING and around[-1] < end:
                around.pop()
            assert not around or end <= around[-1] + ROUNDING, event
            around.append(end)


def processes(events: Sequence[Event]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def of(events: Sequence[Event], process: str, kind: str) -> list[Event]:
    """The events of a kind of one process."""
    names = processes(events)
    return [event for event in events if names[event["pid"]] == process and event["ph"] == kind]


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "prefill", "decode", "decode")])
@virtual
async def test_the_trace_of_a_fleet_that_loses_a_worker(
    clock: VirtualLoop, tmp_path: Path, roles: tuple[Role, ...]
) -> None:
    """Each request once at its edge with its stages, and these at their workers; whoever joined; load."""
    path = tmp_path / "trace.json"
    async with told(clock, roles) as fleet:
        assert await write(ports_of(fleet), POOL, str(path)) == 0
        _compare(read(path), await _requests(fleet), fleet)


async def _requests(fleet: SimFleet) -> list[Any]:
    pieces = [piece async for piece in fleet.store.requests.read(0, follow=False)]
    return [event for piece in pieces for record in piece.records for event in record.batch.events]


def _compare(events: list[Event], logged: list[Any], fleet: SimFleet) -> None:
    ended = {event.request: event for event in logged if isinstance(event, RequestEnded)}
    wholes = {event["name"]: event for event in events if event["ph"] == "X" and event["cat"] == "request"}
    assert wholes.keys() == ended.keys()
    for request, event in ended.items():
        # The log has the time at which its server stored an event.
        assert wholes[request]["dur"] / 1000 == pytest.approx(event.duration_ms, abs=400)
        assert wholes[request]["args"]["completion_tokens"] == event.completion_tokens
    at_workers = [event for name in fleet.engines for event in of(events, name, "X")]
    attempts = {
        (one["args"]["request"], one["args"]["attempt"]) for one in at_workers if "attempt" in one["args"]
    }
    legs = Counter(request for request, _ in attempts)
    assert legs == Counter(event.request for event in logged if isinstance(event, RequestRouted))
    started = Counter(event["args"]["request"] for event in at_workers if event["name"] == "decode")
    for event in logged:
        if isinstance(event, RequestStarted):
            assert started[event.request]
    failures = [
        event for name in fleet.engines for event in of(events, name, "i") if event["name"] == "req.stepped"
    ]
    assert len(failures) == sum(isinstance(event, RequestStepped) and bool(event.worker) for event in logged)
    for name in fleet.engines:
        assert {event["name"] for event in of(events, name, "C")} == {"requests", "KV used %"}
        assert any(event["name"] == "fleet.joined" for event in of(events, name, "i"))


async def a_fleet() -> ToldFleet:
    """A request that ends, with one second for each stage, and another one that is open; 3 s at the start are empty."""
    made = await told_fleet()
    clock = clock_of(made)
    await made.join("w1", "w2")
    await clock.advance(3)
    for request in ("a", "b"):
        await made.tell_request(RequestAccepted(request, "m", "chat", 96, 50, True))
        await clock.advance(1)
        await made.decide(route_query(f"{request}-0-1", 96, pinned="w1"))
        await made.report("w1", 1, 2, 250)
        await made.tell_request(RequestRouted(request, 0, f"{request}-0-1", "w1", 1, 0))
        await clock.advance(1)
        await made.tell_request(RequestStarted(request, 0, "w1", 1, 0, 9.0))
        await clock.advance(1)
        if request == "a":
            await made.tell_request(RequestEnded("a", "stop", 7, 0, 0, 9.0, 9.0))
    await made.report("w1", 0, 0, 0)
    return made


async def test_stages_are_where_and_when_they_were(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    assert await write((await a_fleet()).ports, "p", str(path)) == 0
    assert capsys.readouterr().err.startswith(
        "pool p, positions 0 to 9: 1 requests that ended, 1 open ones; "
    )
    events = read(path)
    assert [
        (event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in of(events, "edge e1", "X")
    ] == [
        ("a", 3, 3),
        ("route", 3, 1),
        ("prefill at w1", 4, 1),
        ("decode at w1", 5, 1),
        ("b", 6, 3),
        ("route", 6, 1),
        ("prefill at w1", 7, 1),
        ("decode at w1", 8, 1),
    ]
    assert [(event["name"], event["args"]["request"]) for event in of(events, "w1", "X")] == [
        ("prefill", "a"),
        ("decode", "a"),
        ("prefill", "b"),
        ("decode", "b"),
    ]
    assert of(events, "edge e1", "X")[4]["args"]["state"] == "open at the trace's end"
    # Values that stay the same are written once.
    assert [event["args"] for event in of(events, "w1", "C") if event["name"] == "requests"] == [
        {"running": 1, "waiting": 2},
        {"running": 0, "waiting": 0},
    ]
    assert [event["args"] for event in of(events, "w1", "C") if event["name"] == "KV used %"] == [
        {"used": 25.0},
        {"used": 0.0},
    ]
    assert [event["name"] for event in of(events, "w2", "i")] == ["fleet.joined"]


async def test_a_part_of_the_logs(tmp_path: Path) -> None:
    """Of a request that began before it has the rest."""
    path, made = tmp_path / "trace.json", await a_fleet()
    assert await write(made.ports, "p", str(path), "-4s", "-1.5s") == 0
    events = read(path)
    wholes = {event["name"]: event for event in of(events, "edge e1", "X") if event["cat"] == "request"}
    assert wholes.keys() == {"b"}
    assert await write(made.ports, "p", str(path), "4", "6") == 0
    events = read(path)
    [whole] = [event for event in of(events, "edge e1", "X") if event["cat"] == "request"]
    assert (whole["name"], whole["args"]["began"]) == ("a", "before the trace")
    assert [event["name"] for event in of(events, "w1", "X")] == ["prefill"]
    for start, end in (("5", "5"), ("6", "2")):
        with pytest.raises(ConfigError, match="there is nothing between them"):
            await write(made.ports, "p", str(path), start, end)


async def test_a_file_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Nothing is left of a trace that failed; standard output has nothing but the trace."""
    made, path = await a_fleet(), tmp_path / "trace.json"
    path.write_text("before")
    scan = MemoryLog.scan

    async def fails(*arguments: Any) -> Any:
        async for piece in scan(*arguments):
            yield piece
        raise LogUnavailable("it went away")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryLog, "scan", fails)
        with pytest.raises(LogUnavailable):
            await write(made.ports, "p", str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "before"
    capfdbinary.readouterr()
    assert await write(made.ports, "p", str(path), as_json=True) == 0
    report = json.loads(capfdbinary.readouterr().out)
    assert (report["ended"], report["open"], report["left_out"]) == (1, 1, 0)
    assert report["events"] == len(read(path))


async def test_what_is_held_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The oldest requests that do not end are left out, which is told."""
    monkeypatch.setattr(module, "OPEN_MAX", 3)
    made, path = await told_fleet(), tmp_path / "trace.json"
    await made.join("w1")
    for number in range(5):
        await made.tell_request(RequestAccepted(f"open-{number}", "m", "chat", 96, 50, True))
    await made.tell_request(RequestEnded("open-4", "stop", 7, 0, 0, 9.0, 9.0))
    await clock_of(made).advance(1)
    await made.tell("fleet", "w2", WorkerJoined("w2", 1, "m", "sim", "both", 16, 9, 9))
    await write(made.ports, "p", str(path))
    assert "1 requests that ended, 2 open ones, 2 left out;" in capsys.readouterr().err
    assert len(of(read(path), "edge e1", "X")) == 3 * 2


def test_lanes_are_used_again(tmp_path: Path) -> None:
    """By what begins when they are free; what overlaps gets another one."""
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        trace = TraceWriter(file, 0, {})
        trace.process("w", 0)
        for start, end in (
            (0, 10_000),
            (5_000, 20_000),
            (10_000, 15_000),
            (14_000, 30_000),
            (15_000, 16_000),
        ):
            trace.slices("w", [Slice("s", "c", start, end)], "lane")
        trace.close()
    assert [event["tid"] for event in read(path) if event["ph"] == "X"] == [2, 3, 2, 4, 2]


def test_a_format_must_be_named(capsys: Capture) -> None:
    assert main(["export", "-o", "x.json"]) == 2
    assert "export: name the format: --perfetto" in capsys.readouterr().err
