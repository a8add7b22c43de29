"""`headwater top`: the present state of each worker, and its last minute."""

import asyncio
import io
import json
import os
import shutil

import pytest

from headwater.ops.debug.places import open_log
from headwater.ops.debug.top import ENTER, LEAVE, Present, as_line, as_text, begin, live, redraw
from headwater.schemas.events import BlocksStored, KvGap, RequestStarted, WorkerChanged, WorkerDraining
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.worlds.clock import settle
from tests.support.worlds.told_fleet import ToldFleet, clock_of, told_fleet


async def a_fleet() -> ToldFleet:
    """Two workers that have computed prompts long ago and just now, and one of another pool."""
    told = await told_fleet()
    await told.join("w1", "w2")
    for number, age_s in enumerate((100, 20, 5), 1):
        await told.decide(route_query(f"a{number}-0-1", 100, pinned="w1"))
        await told.report("w1", prefilled=(f"a{number}-0-1",), cached=(number * 10,))
        await told.tell_request(RequestStarted(f"a{number}", 0, "w1", 1, 0, number * 10.0))
        await clock_of(told).advance(age_s)
    await told.tell_request(RequestStarted("b", 0, "other", 1, 0, 999.0))
    await told.tell("kv", "w1", BlocksStored(0, packed(1, 2, 3)))
    await told.report("w1", 3, 4, 500, step_us=7_000, gaps=9)
    return told


async def present_of(told: ToldFleet) -> Present:
    """What `top` has of it when it starts."""
    return (await begin(told.ports, await open_log(told.ports, "p"))).present


async def test_a_worker_is_shown_as_the_fold_has_it() -> None:
    told = await a_fleet()
    await told.decide(route_query("c-0-1", 64, pinned="w1"))
    present = await present_of(told)
    assert present.state.digest() == told.state.digest()
    one, two = present.rows(told.ports.clock.wall_ns())
    assert (one.worker, one.state, one.role, one.running, one.waiting) == ("w1", "ready", "both", 3, 4)
    assert (one.kv_used, one.cached_blocks, one.step_ms) == (0.5, 3, 7.0)
    # The three before have their first token, and have not ended.
    assert (one.requests, one.queued_tokens) == (4, 64)
    assert (two.running, two.hit_rate, two.ttft_p50_ms) == (0, None, None)


async def test_times_and_hits_are_of_the_last_minute() -> None:
    """What is older does not count: neither at the start nor once it has become so."""
    told = await a_fleet()
    present = await present_of(told)
    now_ns = told.ports.clock.wall_ns()
    row = present.rows(now_ns)[0]
    assert (row.hit_rate, row.ttft_p50_ms) == (0.25, 25.0)
    assert present.ttft_ms() == 25.0
    row = present.rows(now_ns + 40_000_000_000)[0]
    assert (row.hit_rate, row.ttft_p50_ms) == (0.3, 30.0)
    row = present.rows(now_ns + 70_000_000_000)[0]
    assert (row.hit_rate, row.ttft_p50_ms) == (None, None)


async def test_states_of_workers() -> None:
    told = await a_fleet()
    await told.tell("fleet", "w1", WorkerDraining("w1", 1))
    await told.tell("kv", "w1", KvGap(1))
    await told.tell("fleet", "w2", WorkerChanged("w2", 1, "sleeping", "decode"))
    rows = (await present_of(told)).rows(told.ports.clock.wall_ns())
    assert [(row.state, row.role) for row in rows] == [("draining (cold)", "both"), ("sleeping", "decode")]


async def test_it_is_a_table_or_an_object() -> None:
    told = await a_fleet()
    present, now_ns = await present_of(told), told.ports.clock.wall_ns()
    pool, head, _, _, one, two = as_text("p", present, now_ns).splitlines()
    assert pool.startswith("pool p, position 12, 2027-")
    assert head.startswith("2 of 2 workers ready, 3 distinct blocks; 3 first tokens in a minute, ")
    assert one.split() == ["w1", "ready", "both", "3", "4", "50%", "0", "3", "3", "7.0", "25%", "25.0"]
    assert two.split()[-3:] == ["-", "-", "-"]
    data = json.loads(as_line("p", present, now_ns))
    assert (data["position"], data["workers"][0]["ttft_p50_ms"]) == (12, 25.0)
    empty = await present_of(await told_fleet())
    assert as_text("p", empty, now_ns).endswith("\nno worker has joined this pool")


async def test_the_screen_follows_the_logs_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    told, out = await a_fleet(), io.StringIO()
    log = await open_log(told.ports, "p")
    monkeypatch.setattr("headwater.ops.debug.top.PERIOD_S", 0.0)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    task = asyncio.create_task(live(told.ports, "p", log, await begin(told.ports, log), out))
    await settle()
    assert out.getvalue().startswith(ENTER)
    assert "position 12," in out.getvalue()
    await told.report("w2", 77)
    await told.tell_request(RequestStarted("d", 0, "w2", 1, 0, 123.0))
    await settle()
    assert "position 13," in out.getvalue()
    assert "77" in out.getvalue()
    assert "123.0" in out.getvalue()
    assert LEAVE not in out.getvalue()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert out.getvalue().endswith(LEAVE)


def test_what_does_not_fit_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions."""
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((5, 3)))
    out = io.StringIO()
    redraw(out, "abcdefgh\nb\nc\nd\ne")
    assert out.getvalue() == "\x1b[Habcde\x1b[K\r\nb\x1b[K\r\n… and\x1b[K\x1b[J"
