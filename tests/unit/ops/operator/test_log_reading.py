"""What commands read of the logs: a request, by the time in its id, where it may be; and the states that they fold on from."""

from collections.abc import AsyncIterator, Sequence
from io import StringIO
from typing import Any

import msgspec
import pytest

from headwater.actors.runtime.ports import Ports
from headwater.events.memory import MemoryLog
from headwater.events.ports import Entry, StoredMessage
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.operator.explain import account, as_data, lines_of
from headwater.ops.operator.log import audited
from headwater.ops.operator.log_reading import find_life, first_state, folded, newest_state
from headwater.ops.terminal import QUIET_S, Progress
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import (
    EnginesWeighted,
    RequestAccepted,
    RequestStepped,
    TrafficSplit,
    WorkerControlled,
    WorkerLeft,
)
from headwater.schemas.subjects import pool_subject, snapshot_name
from tests.bench.large_log import POOL, MadeUpFleet
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world
from tests.support.worlds.told_fleet import told_fleet

STEP_S = 0.05
MESSAGES = 9_000


class CountingLog(MemoryLog):
    """Counts the messages that scans read."""

    scanned = 0

    async def scan_raw(
        self, after: int, until: int, subjects: Sequence[str] = ()
    ) -> AsyncIterator[list[StoredMessage]]:
        """See `Log.scan_raw`."""
        async for run in super().scan_raw(after, until, subjects):
            self.scanned += len(run)
            yield run


async def world_of(clock: ManualClock, *, ahead_s: float = 0.0) -> tuple[Ports, list[str]]:
    """Logs of ten minutes, and the requests in them. The edge's clock is `ahead_s` of that of the log's server."""
    pool, requests, edge = CountingLog(clock), CountingLog(clock), ManualClock()
    ports = memory_world(clock)

    async def pool_log(_: str) -> MemoryLog:
        return pool

    fleet = MadeUpFleet("ns", edge)
    for number, message in enumerate(fleet.messages()):
        if number == MESSAGES:
            break
        log = requests if ".req." in message.subject else pool
        await log.append(Entry(message.subject, message.sealed))
        clock.now_s += STEP_S
        edge.now_s = clock.now_s + ahead_s
    return ports._replace(requests=requests, pool_log=pool_log), fleet.requests


def scanned(ports: Ports, pool: Any) -> int:
    """Messages that were read of both logs."""
    requests: Any = ports.requests
    return int(requests.scanned + pool.scanned)


@pytest.mark.parametrize("ahead_s", [0.0, 50.0, -50.0, 900.0])
async def test_a_request_is_found_by_the_time_in_its_id(ahead_s: float) -> None:
    """In a part of the logs, whose size depends on how well the clocks agree; beyond the margin in the whole of them."""
    ports, requests = await world_of(ManualClock(), ahead_s=ahead_s)
    pool = await ports.pool_log(POOL)
    for request in (requests[3], requests[len(requests) // 2], requests[-60]):
        before = scanned(ports, pool)
        found = await account(ports, POOL, request)
        assert [one.decision.request for one in found.decisions] == [f"{request}-0-1"]
        tags = [type(one.event).__struct_config__.tag for one in found.life]
        assert tags == ["req.accepted", "req.routed", "req.started", "req.ended"]
        assert any("prompt tokens cached" in line for line in found.decisions[0].after)
        assert found.decisions[0].engines == {f"w{number}": "sim" for number in range(8)}
        read = scanned(ports, pool) - before
        assert read < MESSAGES / 5 if ahead_s == 0 else read < 2.5 * MESSAGES


async def test_a_request_without_a_time_in_its_id_is_found_too() -> None:
    """The whole log is read, and what is not there is not found."""
    clock = ManualClock()
    ports, _ = await world_of(clock)
    name = "chatcmpl-sim-17"
    event = RequestAccepted(name, "sim", "chat", 10, 20, True)
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "edge2", 1, 1, clock.wall_ns(), (event,))
    await ports.requests.append(Entry("hw.ns.req.edge2", seal(batch)))
    assert [one.event for one in await find_life(ports.requests, name, clock.wall_ns())] == [event]
    found = await account(ports, POOL, name)
    assert lines_of(name, found)[-1].startswith(f"no decision for {name}: it ended before a router chose")
    missing = await account(ports, POOL, "chatcmpl-none")
    assert "no decision for chatcmpl-none in this log" in lines_of("chatcmpl-none", missing)[-1]


async def test_the_end_of_a_worker_is_part_of_the_report() -> None:
    """Also where it comes long after the request's end."""
    clock = ManualClock()
    ports, requests = await world_of(clock)
    request = requests[-1]
    step = RequestStepped(request, 0, "decode", "worker_left", "routing", "w1", 1, "it is gone")
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "edge2", 1, 1, clock.wall_ns(), (step,))
    await ports.requests.append(Entry("hw.ns.req.edge2", seal(batch)))
    clock.now_s += 1_000
    left: Batch[Any] = Batch(
        SCHEMA_VERSION, "r1", 9, 1, clock.wall_ns(), (WorkerLeft("w1", 1, "lease lapsed"),)
    )
    log = await ports.pool_log(POOL)
    await log.append(Entry(pool_subject("ns", POOL, "fleet", "r1"), seal(left)))
    found = await account(ports, POOL, request)
    assert lines_of(request, found)[-1] == "  worker w1.1 left: lease lapsed"


async def test_the_report_for_programs_has_all_of_it() -> None:
    """Decisions with candidates, and events, by the names of their fields; contents are left out."""
    ports, requests = await world_of(ManualClock())
    found = await account(ports, POOL, requests[40])
    data = msgspec.json.decode(msgspec.json.encode(as_data(POOL, requests[40], found)))
    [one] = data["decisions"]
    assert one["decision"]["request"] == f"{requests[40]}-0-1"
    assert [candidate["worker"] for candidate in one["decision"]["candidates"]] == [
        f"w{number}" for number in range(8)
    ]
    assert one["router"] == {"name": "r1", "epoch": 1}
    assert one["engines"]["w3"] == "sim"
    assert [event["event"] for event in data["events"]] == [
        "req.accepted",
        "req.routed",
        "req.started",
        "req.ended",
    ]
    assert data["events"][0]["prompt_tokens"] == found.decisions[0].decision.prompt_tokens
    assert "body" not in data["events"][0]


def test_progress_is_shown_on_a_terminal_once_it_takes_long() -> None:
    """One line that is written over itself and removed at the end; nothing in a pipe, and nothing that is fast."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (StringIO(), False)):
        times = iter((0.0, 0.0, QUIET_S + 1, QUIET_S + 1))
        with Progress("folding", stream=stream, now_s=times.__next__) as progress:
            progress.at(1, 1_000)
            assert stream.getvalue() == ""
            progress.at(500, 1_000)
            progress.at(501, 1_000)
        expected = "folding: 500 of 1,000 positions (50%), about 2 s left"
        assert stream.getvalue() == (f"\r{expected}\r{' ' * len(expected)}\r" if shown else "")


async def test_the_newest_usable_snapshot_is_taken_and_the_others_are_told_of() -> None:
    """Up to a position; with one that is damaged an older one; none of another log of this name."""
    told = await told_fleet()
    store, heard = SnapshotStore(told.ports.blobs, "p"), list[str]()
    told.state.log = await told.log.identity()
    for worker in ("w1", "w2", "w3"):
        await told.join(worker)
        if worker == "w3":
            told.state.log = "another"
        await store.save(told.state.snapshot())
        # Else only the newest two stay.
        await store.bookmarks.put(worker, told.state.position)
    await told.join("w4")

    async def position_of(until: int) -> int | None:
        state = await newest_state(store, told.log, until, heard.append)
        return None if state is None else state.position

    assert await position_of(1) is None
    assert [await position_of(until) for until in (3, 4)] == [2, 4]
    assert not heard
    assert await position_of(8) == 4
    assert heard == ["the snapshot at position 6 is of another log that had this name before"]
    await told.ports.blobs.put(snapshot_name("p", 4), b"?")
    assert await position_of(5) == 2
    assert heard[1].startswith("the snapshot at position 4 is unreadable: ")
    assert sorted((await folded(told.log, store)).loads.workers) == ["w1", "w2", "w3", "w4"]
    assert isinstance(told.log, MemoryLog)
    told.log.purge(2)
    oldest = await first_state(store, told.log)
    assert oldest is not None
    assert oldest.position == 2


async def test_who_had_workers_do_what() -> None:
    """Commands as they were given, and weights and splits as commands to the router that wrote them."""
    told = await told_fleet()
    await told.join("w1")
    await told.tell("fleet", "w1", WorkerControlled("w1", 1, "drain", b'{"within_s":2}', "amy", 200, "done"))
    weights = (EnginesWeighted({"sim": 2.0}, "amy"), EnginesWeighted({}, "bob"))
    splits = (TrafficSplit("revision", {"a": 1.0}, 0, "amy"), TrafficSplit("policy", {}, 0, "bob", "slow"))
    for event in (*weights, *splits):
        await told.tell("fleet", "r1", event)
    fields = ("worker", "command", "arguments", "by", "detail")
    assert [tuple(one[name] for name in fields) for one in await audited(told.log)] == [
        ("w1", "drain", {"within_s": 2}, "amy", "done"),
        ("r1", "weights", {"sim": 2.0}, "amy", "engine weights set"),
        ("r1", "weights", {}, "bob", "engine weights removed"),
        ("r1", "split by revision", {"a": 1.0}, "amy", "traffic split set"),
        ("r1", "split by policy", {}, "bob", "slow"),
    ]
