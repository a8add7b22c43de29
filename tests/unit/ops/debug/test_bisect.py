"""`headwater bisect`: the first position where a condition holds, as a fold of everything has it, with little read."""

import json
import random

import pytest

from headwater.events.memory import MemoryLog
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.bisect import Searched, search, show
from headwater.ops.debug.predicate import Predicate, Totals, parse
from headwater.router.state import RouterState
from headwater.schemas.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EnginesWeighted,
    KvGap,
    WorkerChanged,
    WorkerDraining,
    WorkerLeft,
    WorkerState,
)
from tests.support.data.examples import joined, packed
from tests.support.data.queries import route_query
from tests.support.ports.logs import records_of, watch_scans
from tests.support.worlds.told_fleet import ToldFleet, clock_of, told_fleet

Capture = pytest.CaptureFixture[str]

CONDITIONS = (
    'worker("w1").cached_blocks > 12',
    'worker("w2").cached_blocks < 4 and worker("w2").present',
    "workers.ready < 2",
    "workers.total == 1",
    'worker("w3").state == "draining"',
    'worker("w1").role != "both"',
    'worker("w2").waiting > 6',
    'worker("w2").kv_used > 0.8 or worker("w1").kv_used > 0.9',
    "workers.running > 15",
    'workers.max("waiting") - workers.min("waiting") >= 8',
    'worker("w1").requests >= 4',
    "workers.requests > 9",
    'worker("w2").queued_tokens > 150',
    "workers.held_blocks > 40",
    'worker("w3").cold',
    "workers.cached_blocks > index.blocks * 2",
    'worker("w1").epoch > 3',
    '"batch" in worker("w1").taints',
    'worker("w1").step_ms > 4',
    'worker("w9").waiting > 1',
    'worker("w1").requests >= 3 and workers.waiting > 8',
    'worker("w1").cached_blocks > 8 and workers.max("running") > 6',
    'worker("w3").cold and worker("w1").queued_tokens > 50 or workers.min("kv_used") > 0.6',
)


STATES: tuple[WorkerState, ...] = ("ready", "ready", "ready", "paused", "sleeping")


async def a_life(seed: int, messages: int) -> ToldFleet:
    """Workers that come and go, with caches, load and requests."""
    draw, told = random.Random(seed), await told_fleet()
    await told.join("w1", "w2", "w3")
    epochs = dict.fromkeys(("w1", "w2", "w3"), 1)
    asked: list[tuple[str, str]] = []
    for number in range(messages):
        await clock_of(told).advance(0.5)
        worker = draw.choice(("w1", "w2", "w3"))
        epoch, there = epochs[worker], worker in told.state.loads.workers
        blocks = packed(*draw.sample(range(1, 40), 4))
        chance = draw.random()
        if not there or chance < 0.02:
            epochs[worker] = epoch = epoch + 1
            await told.tell("fleet", worker, joined(worker, epoch), epoch=epoch)
            await told.tell("kv", worker, BlocksCleared(), epoch=epoch)
        elif chance < 0.3:
            await told.tell("kv", worker, BlocksStored(0, blocks), epoch=epoch)
        elif chance < 0.45:
            await told.tell("kv", worker, BlocksRemoved(blocks), epoch=epoch)
        elif chance < 0.48:
            await told.tell("kv", worker, KvGap(1) if draw.random() < 0.5 else BlocksCleared(), epoch=epoch)
        elif chance < 0.65:
            made = await told.try_to_decide(route_query(f"r{number}-0-1", draw.randrange(10, 99)))
            asked += [(made.worker, made.request)] if made is not None else []
        elif chance < 0.93:
            own = [request for name, request in asked if name == worker]
            ended = tuple(request for request in own if draw.random() < 0.3)
            asked = [one for one in asked if one[1] not in ended]
            lists = {"accepted": tuple(own), "prefilled": tuple(own[:1]), "finished": ended}
            await told.report(
                worker,
                draw.randrange(9),
                draw.randrange(9),
                draw.randrange(1000),
                epoch=epoch,
                step_us=draw.randrange(9000),
                gaps=1,
                **lists,
            )
        elif chance < 0.95:
            taints = ("batch",) if draw.random() < 0.3 else ()
            state = draw.choice(STATES)
            await told.tell(
                "fleet",
                worker,
                WorkerChanged(worker, epoch, state, draw.choice(("both", "decode")), (), taints),
                epoch=epoch,
            )
        elif chance < 0.97:
            await told.tell("fleet", worker, WorkerDraining(worker, epoch), epoch=epoch)
        elif chance < 0.98:
            await told.tell("fleet", "r1", WorkerLeft(worker, epoch, "lease lapsed"))
        else:
            await told.tell("fleet", "r1", EnginesWeighted({"sim": 1.0}))
    return told


async def plainly(told: ToldFleet, predicate: Predicate) -> tuple[int | None, int | None]:
    """Where it ceases to hold if it does at the start, and where it begins, by a whole fold of the whole log."""
    state, ceased = RouterState(), None

    def holds() -> bool:
        totals = Totals(state, predicate.sums, predicate.extremes)
        return predicate.holds(tuple(term.read(state, totals) for term in predicate.terms))

    held = holds()
    for record in await records_of(told.log):
        state.apply(record)
        now = holds()
        if now and not held:
            return ceased, record.position
        if held and not now:
            ceased = record.position
        held = now
    return ceased, None


@pytest.mark.parametrize("seed", range(4))
async def test_the_first_position_is_that_of_a_whole_fold(seed: int) -> None:
    """Whatever the condition leaves out. Of these lives most conditions come true in some."""
    told = await a_life(seed, 400)
    found = 0
    for text in CONDITIONS:
        predicate = parse(text)
        wanted = await plainly(told, predicate)
        searched = await search(told.ports, "p", predicate, "", "end")
        position = searched.found.position if searched.found else None
        assert (searched.ceased, position) == wanted, text
        found += position is not None
    assert found > len(CONDITIONS) // 2


async def test_only_what_it_depends_on_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds, and the writers where the condition is about named workers; decisions have no such writer."""
    told = await a_life(1, 50)
    asked = watch_scans(monkeypatch)
    for text, wanted in (
        ("workers.ready > 9", ["fleet.*"]),
        ('worker("w1").waiting > 99', ["fleet.*", "load.w1"]),
        ('worker("w1").cached_blocks > 99', ["fleet.*", "kv.w1"]),
        ('worker("w1").requests > 99', ["fleet.*", "load.w1", "route.*"]),
        ("workers.cached_blocks > 999", ["fleet.*", "kv.*"]),
        ('worker("w1").cached_blocks > 99 and workers.waiting > 99', ["fleet.*", "kv.w1", "load.*"]),
        ('worker("w1").requests > 99 and workers.ready > 9', ["fleet.*", "load.w1", "route.*"]),
    ):
        asked.clear()
        await search(told.ports, "p", parse(text), "", "end")
        # Each subject by itself, once up to the start and once from there.
        assert [name.removeprefix("hw.ns.pool.p.") for [name] in asked] == [*wanted, *wanted]


async def a_fleet() -> ToldFleet:
    """Two workers; w1 has 3 blocks at position 5, 1 at 7 and is draining at 9."""
    told = await told_fleet()
    await told.join("w1", "w2")
    await told.tell("kv", "w1", BlocksStored(0, packed(1, 2, 3)))
    await told.report("w1", 1)
    await clock_of(told).advance(60)
    await told.tell("kv", "w1", BlocksRemoved(packed(2, 3)))
    await told.report("w2", 2)
    await told.tell("fleet", "w1", WorkerDraining("w1", 1))
    return told


async def searched(told: ToldFleet, text: str, start: str = "", end: str = "end") -> Searched:
    return await search(told.ports, "p", parse(text), start, end)


async def test_where_it_begins_and_ends() -> None:
    """At its start the state is that of all before; what holds there must cease before it can begin."""
    told = await a_fleet()
    few = 'worker("w1").cached_blocks < 3'
    for start, wanted in (
        ("0", (False, None, 1)),
        ("", (False, None, 1)),
        ("1", (True, 5, 7)),
        ("5", (False, None, 7)),
        ("-30s", (False, None, 7)),
        ("7", (True, None, None)),
    ):
        got = await searched(told, few, start)
        assert (got.held, got.ceased, got.found.position if got.found else None) == wanted
    assert (await searched(told, few, "5", "6")).holds is False
    with pytest.raises(ConfigError, match="--from is position 7 and --to is 2"):
        await searched(told, few, "7", "2")
    with pytest.raises(ConfigError, match="--to 10: the log holds positions 1 to 9"):
        await searched(told, few, "7", "10")


async def test_it_continues_the_oldest_snapshot_where_the_start_is_gone(capsys: Capture) -> None:
    told = await a_fleet()
    earlier = await told_fleet()
    await earlier.join("w1", "w2")
    await earlier.tell("kv", "w1", BlocksStored(0, packed(1, 2, 3)))
    earlier.state.log = await told.log.identity()
    await SnapshotStore(told.ports.blobs, "p").save(earlier.state.snapshot())
    assert isinstance(told.log, MemoryLog)
    told.log.purge(4)
    found = await searched(told, 'worker("w1").cached_blocks == 1')
    assert (found.start, found.found and found.found.position) == (5, 7)
    assert capsys.readouterr().err == ""


async def test_the_result_for_people(capsys: Capture) -> None:
    """With the values before and there, and the message; or what there is at the end, and who was not there."""
    told = await a_fleet()
    assert await show(told.ports, "p", parse('worker("w1").cached_blocks < 3'), "5") == 0
    assert capsys.readouterr().out.splitlines() == [
        'pool p, position 7, 2027-01-15T08:01:00.000Z: worker("w1").cached_blocks < 3',
        "fact                        before  there",
        "--------------------------  ------  -----",
        'worker("w1").cached_blocks  3       1',
        "by a message of w1, epoch 1:",
        "  kv.removed  2 blocks from gpu",
    ]
    assert await show(told.ports, "p", parse('worker("w9").waiting > 2')) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        'pool p: it does not begin to hold from position 0 to 9: worker("w9").waiting > 2',
        "worker w9 was not in the pool; there were: w1, w2",
    ]
    assert await show(told.ports, "p", parse("workers.ready == 1"), "9") == 0
    assert "it holds where the search begins, at position 9, to the end" in capsys.readouterr().out
    assert await show(told.ports, "p", parse("workers.ready < 2")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "pool p: it holds where the search begins, at position 0, until position 3\npool p, position 9"
    )
    assert isinstance(told.log, MemoryLog)
    told.log.alter(8, b"garbage")
    assert await show(told.ports, "p", parse('worker("w2").cold')) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('pool p, position 8: worker("w2").cold\n')
    assert "\nby an unreadable message of hw.ns.pool.p.load.w2: not a batch" in shown


async def test_the_result_for_programs(capsys: Capture) -> None:
    told = await a_fleet()
    assert await show(told.ports, "p", parse('worker("w1").state == "draining"'), as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["position"], data["time"]) == (9, "2027-01-15T08:01:00.000Z")
    assert data["before"] == {'worker("w1").state': "ready"}
    assert data["values"] == {'worker("w1").state': "draining"}
    assert data["message"]["events"] == [{"event": "fleet.draining", "fields": {"worker": "w1", "epoch": 1}}]
    assert await show(told.ports, "p", parse("workers.ready == 9"), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["position"] is None
