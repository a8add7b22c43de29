"""`headwater capture` against a server, and other commands on its file: the same output as on the server."""

import asyncio
import json
import re
import socket
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from headwater.ops.commands.application import parse
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.console.prefixes import tree_view
from headwater.ops.console.query import Query
from headwater.ops.console.records import decision_view
from headwater.ops.console.views import fleet_view
from headwater.ops.debug.stuck import stuck
from headwater.ops.debug.tail import Wanted, tail
from headwater.ops.debug.why_not import why_not
from headwater.ops.history.history import History
from headwater.ops.nats.capture_file import CaptureFile
from headwater.ops.nats.capture_ports import capture_ports
from headwater.ops.operator import capture as command
from headwater.ops.operator.capture import Order, capture
from headwater.ops.operator.explain import explain
from headwater.ops.operator.log import show_log, show_tree, snapshots
from headwater.ops.operator.replay import replay
from headwater.ops.whatif.command import recorded_run
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import RequestAccepted
from tests.bench.large_log import BLOCK, POOL
from tests.support.ports.logs import append_one
from tests.support.servers.nats import NatsServer
from tests.support.worlds.made_up_log import MadeUpLog, made_up_log


@pytest.fixture
async def case(server: NatsServer, unique: str) -> AsyncIterator[MadeUpLog]:
    """12,000 events."""
    async with made_up_log(server, unique, 4_000, 8_000) as made:
        await made.ports.cards.put(POOL, b"{}")
        yield made


async def minutes_after(case: MadeUpLog, request: str) -> float:
    """The time that the logs go on after a request was accepted: half of it is captured on each side, however fast it was written."""
    last = (await case.ports.requests.bounds()).last
    times = [
        (record.stored_ns, getattr(event, "request", ""))
        async for piece in case.ports.requests.scan(0, last)
        for record in piece.records
        for event in record.batch.events
    ]
    accepted_ns = next(time_ns for time_ns, name in times if name == request)
    return (times[-1][0] - accepted_ns) / 60e9


async def printed(capsys: pytest.CaptureFixture[str], work: Awaitable[int]) -> str:
    """What a command prints, and its exit code."""
    capsys.readouterr()
    code = await work
    return f"{capsys.readouterr().out}{code}"


COMMANDS: tuple[Callable[[NatsSettings], Awaitable[int]], ...] = (
    lambda nats: replay(nats, "", verify=True),
    lambda nats: show_tree(nats, "", worker="", depth=-1, limit=50, as_json=True),
    lambda nats: show_log(nats, ""),
    lambda nats: show_log(nats, "", requests=True),
    lambda nats: show_log(nats, "", audit=True, as_json=True),
)


async def test_commands_read_a_capture_of_all_as_they_read_the_server(
    case: MadeUpLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte."""
    path = tmp_path / "all.hwc"
    assert await capture(case.nats, "", Order(case.fleet.requests[-1], 5.0, path)) == 0
    file = NatsSettings(capture=str(path))
    request = case.fleet.requests[len(case.fleet.requests) // 2]
    for one in COMMANDS:
        assert await printed(capsys, one(file)) == await printed(capsys, one(case.nats))
    explained = await printed(capsys, explain(file, "", request, every=True, as_json=True))
    assert explained == await printed(capsys, explain(case.nats, "", request, every=True, as_json=True))


@contextmanager
def metrics_of(text: bytes) -> Iterator[str]:
    """A process whose metrics are `text`; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing on the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


async def test_a_capture_has_the_metrics_of_processes_and_the_versions(
    case: MadeUpLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those that answer; a process that has ended does not keep it from being made."""
    path, again = tmp_path / "all.hwc", tmp_path / "again.hwc"
    around = case.fleet.requests[-1]
    with metrics_of(b"headwater_up 1\n") as address, socket.create_server(("127.0.0.1", 0)) as gone:
        groups = [
            {"targets": [address], "labels": {"name": "router-0"}},
            {"targets": [f"127.0.0.1:{gone.getsockname()[1]}"], "labels": {"name": "edge-0"}},
        ]
        gone.close()
        (tmp_path / "prometheus-targets.json").write_text(json.dumps(groups))
        assert await capture(case.nats, "", Order(around, 5.0, path, data_dir=tmp_path)) == 0
    # Of a capture another is made where the folder is elsewhere.
    capturing = capture(NatsSettings(capture=str(path)), "", Order(around, 5.0, again), as_json=True)
    told = json.loads((await printed(capsys, capturing)).removesuffix("0"))
    assert (told["file"], told["bytes"]) == (str(again), again.stat().st_size)
    assert json.loads(zipfile.ZipFile(again).read("capture.json")).items() <= told.items()
    with closing(CaptureFile(path)) as one, closing(CaptureFile(again)) as other:
        [(name, member)] = one.contents.metrics.items()
        assert name == f"router-0 ({address})"
        assert zipfile.ZipFile(path).read(member) == b"headwater_up 1\n"
        assert re.fullmatch(r"nats-server 2\.\d+\.\d+", one.contents.server)
        assert other.contents.server == one.contents.server
        assert other.contents.metrics == {}


async def test_a_capture_of_a_moment_begins_at_the_snapshot_before_it(
    case: MadeUpLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends with the moment; every decision in it is verified, and the request is explained as on the server."""
    path = tmp_path / "moment.hwc"
    request = case.fleet.requests[len(case.fleet.requests) * 2 // 3]
    shown = await printed(
        capsys, capture(case.nats, POOL, Order(request, await minutes_after(case, request), path))
    )
    assert f"with the snapshot at position {case.snapshot}" in shown
    async with capture_ports(path) as ports:
        bounds = await (await ports.pool_log(POOL)).bounds()
        assert bounds.first == case.snapshot + 1
        assert case.snapshot < bounds.last < case.fleet.state.position
        assert (await ports.cards.get(POOL)) is not None
        last = (await ports.requests.bounds()).last
        raw = {one.position: one async for run in ports.requests.scan_raw(0, last) for one in run}
        async for run in case.ports.requests.scan_raw(min(raw) - 1, last):
            assert [raw[one.position] for one in run] == run
    file = NatsSettings(capture=str(path))
    verified = await printed(capsys, replay(file, "", verify=True))
    assert f"positions {case.snapshot + 1} to {bounds.last}" in verified
    assert verified.endswith("decisions: equal\n0")
    assert await printed(capsys, explain(file, "", request)) == await printed(
        capsys, explain(case.nats, "", request)
    )
    assert str(case.snapshot) in await printed(capsys, snapshots(file, ""))
    again = tmp_path / "again.hwc"
    assert await capture(file, "", Order(request, await minutes_after(case, request) / 2, again)) == 0
    async with capture_ports(again) as ports:
        assert (await (await ports.pool_log(POOL)).bounds()).last <= bounds.last
    assert "equal" in await printed(capsys, replay(NatsSettings(capture=str(again)), "", verify=True))


async def test_without_an_older_snapshot_the_log_before_is_folded_into_one(
    case: MadeUpLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is long; a short one is part of the capture. Either way the fold ends in the same state."""
    for name in await case.ports.blobs.names(""):
        await case.ports.blobs.delete(name)
    request = case.fleet.requests[len(case.fleet.requests) * 2 // 3]
    states = set()
    for most, start in ((10, "positions 1 to "), (1_000_000, "with no snapshot")):
        monkeypatch.setattr(command, "PREFIX_MESSAGES_MAX", most)
        path = tmp_path / f"{most}.hwc"
        assert start in await printed(
            capsys, capture(case.nats, POOL, Order(request, await minutes_after(case, request), path))
        )
        verified = await printed(capsys, replay(NatsSettings(capture=str(path)), "", verify=True))
        assert verified.endswith("decisions: equal\n0")
        states.add(verified.partition("workers")[2].splitlines()[0])
    assert len(states) == 1


async def test_recorded_prompts_are_left_out_unless_they_are_asked_for(
    case: MadeUpLog, tmp_path: Path
) -> None:
    """By default a capture can be passed on."""
    event = RequestAccepted("chatcmpl-x", "sim", "chat", 5, 9, True, payload="full", body=b"my secret")
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "e2", 1, 1, case.ports.clock.wall_ns(), (event,))
    await append_one(case.ports.requests, f"hw.{case.nats.namespace}.req.e2", batch)
    for keep in (False, True):
        path = tmp_path / f"{keep}.hwc"
        await capture(case.nats, "", Order("chatcmpl-x", 5.0, path, with_contents=keep))
        async with capture_ports(path) as ports:
            last = (await ports.requests.bounds()).last
            data = b"".join([one.data async for run in ports.requests.scan_raw(0, last) for one in run])
        assert (b"my secret" in data) is keep
        assert b"chatcmpl-x" in data
    assert seal(batch).data in data


async def test_what_cannot_be_captured_is_told(case: MadeUpLog, tmp_path: Path) -> None:
    """A request or time that is not there, a file that cannot be written; nothing is left of the try."""
    path = tmp_path / "a.hwc"
    for around, text in (
        ("chatcmpl-none", "has no such request, and it is no time"),
        ("2001-01-01", "has nothing from 2000-12-31"),
        ("2199-01-01", "is in the future"),
    ):
        with pytest.raises(ConfigError, match=text):
            await capture(case.nats, "", Order(around, 5.0, path))
    for output in (tmp_path, tmp_path / "none" / "a.hwc"):
        with pytest.raises(ConfigError, match="name a file in a folder that exists"):
            await capture(case.nats, "", Order("-1m", 5.0, output))
    assert [one for one in tmp_path.iterdir() if "hwc" in one.name] == []


async def test_the_command_line_reads_a_capture(
    case: MadeUpLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--file` of a command that reads a pool."""
    path = tmp_path / "a.hwc"
    await capture(case.nats, "", Order("-1s", 5.0, path))
    async with capture_ports(path) as ports:
        assert await (await ports.pool_log(POOL)).identity() == await case.log.identity()
    capsys.readouterr()
    bound, _ = parse(["explain", case.fleet.requests[3], "--json", "--file", str(path)])
    settings = bound.arguments["settings"]
    assert await explain(settings.nats, settings.pool, case.fleet.requests[3], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["pool"] == POOL


def without_uses(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree without what depends on decisions before the capture."""
    runs = [
        {name: value for name, value in run.items() if name not in ("uses", "used_ms")}
        for run in tree["runs"]
    ]
    return {**tree, "runs": runs, "uses": 0, "window_s": 0, "notice": ""}


async def test_the_console_shows_a_capture_as_it_shows_the_server(case: MadeUpLog, tmp_path: Path) -> None:
    """At the positions that are in both: workers, decisions, and the tree of blocks."""
    path = tmp_path / "moment.hwc"
    request = case.fleet.requests[len(case.fleet.requests) * 2 // 3]
    assert await capture(case.nats, POOL, Order(request, await minutes_after(case, request), path)) == 0
    served = History(case.ports, POOL, case.log)
    await served.open()
    await served.follow()
    async with capture_ports(path) as ports:
        captured = History(ports, POOL, await ports.pool_log(POOL))
        await captured.open()
        await captured.follow()
        assert captured.indexed_from == case.snapshot
        position = captured.last.position
        assert case.snapshot < position < served.last.position
        for at in (position, (case.snapshot + position) // 2, case.snapshot + 1):
            query = Query({"at": str(at), "limit": "50"})
            theirs, ours = await tree_view(served, query), await tree_view(captured, query)
            assert [run["uses"] for run in ours["runs"]] <= [run["uses"] for run in theirs["runs"]]
            assert ours["window_s"] <= theirs["window_s"]
            assert without_uses(ours) == without_uses(theirs)
            theirs, ours = await fleet_view(served, query), await fleet_view(captured, query)
            loads = [
                [(one["name"], one["requests"], one["used_blocks"]) for one in view["workers"]]
                for view in (ours, theirs)
            ]
            assert loads[0] == loads[1]
        name = captured.requests.by_id[request].id
        decision = Query({"id": f"{name}-0-1", "policy": "kv"})
        shown = [await decision_view(history, decision) for history in (served, captured)]
        assert shown[0]["candidates"] == shown[1]["candidates"]
        assert shown[1]["what_if"]["same"]


async def test_the_debuggers_commands_read_a_capture_that_begins_at_a_snapshot(
    case: MadeUpLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They know who was there when it begins, take its end for the present, and wait for nothing after it."""
    path = tmp_path / "moment.hwc"
    request = case.fleet.requests[len(case.fleet.requests) * 2 // 3]
    assert await capture(case.nats, POOL, Order(request, await minutes_after(case, request), path)) == 0
    file = NatsSettings(capture=str(path))
    async with capture_ports(path) as ports:
        log = await ports.pool_log(POOL)
        last = (await log.bounds()).last
        [newest] = [one async for run in log.scan_raw(last - 1, last) for one in run]
        stored_ns = newest.stored_ns
        # Times of messages are to the nanosecond, those of a capture to the microsecond.
        assert -1_000 <= ports.clock.wall_ns() - stored_ns < 10_000_000_000
    explained = await printed(capsys, explain(file, "", request, as_json=True))
    chosen = json.loads(explained.splitlines()[0].removesuffix("0"))["decisions"][0]["decision"]["worker"]
    other = "w1" if chosen != "w1" else "w2"
    assert f"went to {chosen}" in await printed(capsys, why_not(file, "", request, other, as_json=False))
    assert "no event for" not in await printed(capsys, stuck(file, "", 10.0, as_json=False))
    async with asyncio.timeout(30):
        wanted = Wanted(kinds=frozenset({"route"}))
        assert "route.decided" in await printed(
            capsys, tail(file, "", wanted, "start", follow=True, as_json=False)
        )
    recorded = await recorded_run(file, "", "whatif")
    assert recorded.setup.block_size == BLOCK
    assert recorded.whole > 0
    assert recorded.unknown == 0
