"""`headwater tail`: which events are shown, in which order, from where on, and what is transferred for it."""

import asyncio
import contextlib
import json

import pytest

from headwater.events.memory import MemoryLog
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.tail import TAGS, read_wanted, show
from headwater.schemas.events import BlocksStored, RequestAccepted, RequestEnded, RequestsOpen
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.ports.logs import watch_scans
from tests.support.worlds.clock import settle
from tests.support.worlds.told_fleet import ToldFleet, clock_of, told_fleet

Capture = pytest.CaptureFixture[str]


async def a_fleet() -> ToldFleet:
    """Two workers, a request that is routed and ends, one second apart; positions 1 to 8 of the pool's log."""
    told = await told_fleet()
    await told.join("w1", "w2")
    clock = clock_of(told)
    await clock.advance(1)
    await told.tell_request(RequestAccepted("req-a", "m", "chat", 32, 9, False), RequestsOpen(0))
    await clock.advance(1)
    chosen = (await told.decide(route_query("req-a-0-1", 32, pinned="w1"))).worker
    assert chosen == "w1"
    await clock.advance(1)
    await told.tell("kv", "w1", BlocksStored(0, packed(7, 8)))
    await told.report("w1", 1, accepted=("req-a-0-1",))
    await told.report("w2", 0, 5)
    await clock.advance(1)
    await told.tell_request(RequestEnded("req-a", "stop", 3, 0, 0, 5.0, 9.0), RequestsOpen(-1))
    return told


async def shown(
    told: ToldFleet, capsys: Capture, start: str = "start", **filters: str
) -> list[tuple[int, str]]:
    """(position, name) of what is shown."""
    wanted = read_wanted(**{"kinds": "", "names": "", "worker": "", "request": "", **filters})
    await show(told.ports, "p", wanted, start, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(one["position"], one["event"]) for one in lines]


async def test_both_logs_are_merged_by_time(capsys: Capture) -> None:
    """All events, without the edge's own marks."""
    told = await a_fleet()
    assert await shown(told, capsys) == [
        *[(1, "fleet.joined"), (2, "kv.cleared"), (3, "fleet.joined"), (4, "kv.cleared")],
        *[(1, "req.accepted"), (5, "route.decided"), (6, "kv.stored")],
        *[(7, "load.reported"), (8, "load.reported"), (2, "req.ended")],
    ]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"kinds": "fleet"}, [(1, "fleet.joined"), (3, "fleet.joined")]),
        ({"kinds": "route,req"}, [(1, "req.accepted"), (5, "route.decided"), (2, "req.ended")]),
        ({"names": "req.open"}, [(1, "req.open"), (2, "req.open")]),
        ({"names": "kv.stored, route.decided"}, [(5, "route.decided"), (6, "kv.stored")]),
        ({"worker": "w2"}, [(3, "fleet.joined"), (4, "kv.cleared"), (8, "load.reported")]),
        ({"worker": "w1", "kinds": "route,load"}, [(5, "route.decided"), (7, "load.reported")]),
        (
            {"request": "req-a"},
            [(1, "req.accepted"), (5, "route.decided"), (7, "load.reported"), (2, "req.ended")],
        ),
        ({"request": "re"}, []),
    ],
)
async def test_filters(capsys: Capture, filters: dict[str, str], wanted: list[tuple[int, str]]) -> None:
    assert await shown(await a_fleet(), capsys, **filters) == wanted


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("6", (6, "kv.stored")),
        ("end", (8, "load.reported")),
        ("-1.5s", (6, "kv.stored")),
        ("", (1, "fleet.joined")),
    ],
)
async def test_it_begins_where_it_is_told_to(capsys: Capture, start: str, first: tuple[int, str]) -> None:
    """In both logs: from the time of the position on. Without a start, 20 messages before the end."""
    found = await shown(await a_fleet(), capsys, start)
    assert found[0] == first
    assert found[-1] == (2, "req.ended")


async def test_other_kinds_are_not_transferred(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The subjects that are read are those of the wanted kinds, and of the worker where only it writes them."""
    told = await a_fleet()
    asked = watch_scans(monkeypatch)
    await shown(told, capsys, "1", kinds="fleet,route")
    assert asked[1:] == [["hw.ns.pool.p.fleet.*"], ["hw.ns.pool.p.route.*"]]
    asked.clear()
    await shown(told, capsys, "1", worker="w1", kinds="kv,load,fleet")
    assert asked[1:] == [["hw.ns.pool.p.fleet.*"], ["hw.ns.pool.p.kv.w1"], ["hw.ns.pool.p.load.w1"]]


async def test_following_shows_what_comes(capsys: Capture) -> None:
    """Filtered like the past, which comes first."""
    told = await a_fleet()
    wanted = read_wanted("load,req", "", "", "")
    task = asyncio.create_task(show(told.ports, "p", wanted, "8", follow=True))
    await settle()
    assert len(capsys.readouterr().out.splitlines()) == 2
    await told.tell_request(RequestAccepted("req-b", "m", "chat", 32, 9, False))
    await clock_of(told).advance(0.001)
    await told.tell("kv", "w1", BlocksStored(0, packed(9)))
    await told.report("w1", 4)
    async with asyncio.timeout(10):
        while "running 4" not in (text := capsys.readouterr().out):
            await asyncio.sleep(0.01)
    assert [line.split()[2] for line in text.splitlines()] == ["req.accepted", "load.reported"]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_lines_are_columns_and_messages_that_cannot_be_read_are_told(capsys: Capture) -> None:
    told = await a_fleet()
    assert isinstance(told.log, MemoryLog)
    told.log.alter(7, b"garbage")
    assert await show(told.ports, "p", read_wanted("load,route", "", "", ""), "start") == 0
    decided, broken, load = capsys.readouterr().out.splitlines()
    assert decided.index("route.decided") == load.index("load.reported")
    assert "req-a-0-1 to w1.1: 0 of 0 blocks cached, cost " in decided
    assert "pool: unreadable message of hw.ns.pool.p.load.w1: " in broken
    assert load.endswith("w2.1             running 0, waiting 5, KV 0 of 1000")


async def test_without_an_event_it_fails(capsys: Capture) -> None:
    assert await show((await a_fleet()).ports, "p", read_wanted("", "", "w9", ""), "5") == 1
    assert capsys.readouterr() == ("", "no such event from position 5 on\n")


@pytest.mark.parametrize(
    ("filters", "wrong"),
    [
        (("loads", "", "", ""), "--kind loads: did you mean load?"),
        (("", "route.decide", "", ""), "--event route.decide: did you mean route.decided?"),
        (("", "x", "", ""), "--event x: events are kv.stored, "),
        (("kv", "req.ended", "", ""), "--kind and --event leave no event"),
        (("kv", "", "", "req-a"), "--kind and --request leave no event"),
    ],
)
def test_wrong_filters_are_told(filters: tuple[str, str, str, str], wrong: str) -> None:
    with pytest.raises(ConfigError) as told:
        read_wanted(*filters)
    assert str(told.value).startswith(wrong)


def test_every_event_has_a_kind() -> None:
    """Each name can be asked for by itself."""
    for name in TAGS:
        wanted = read_wanted("", name, "", "")
        assert wanted.of_requests or wanted.pool_subjects("ns", "p"), name


async def test_a_place_that_is_not_there_is_told(capsys: Capture) -> None:
    told = await a_fleet()
    for start, wrong in (
        ("9", "--from 9: the log holds positions 1 to 8"),
        ("x", "--from x: expected a position"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            await shown(told, capsys, start)
