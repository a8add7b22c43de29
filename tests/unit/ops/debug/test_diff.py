"""`headwater diff`: what differs between two positions, by the same fold as the router's."""

import json

import pytest

from headwater.events.memory import MemoryLog
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.diff import compare, facts_of, show
from headwater.schemas.events import (
    BlocksStored,
    EnginesWeighted,
    KvGap,
    WorkerChanged,
    WorkerDraining,
    WorkerLeft,
)
from tests.support.data.examples import joined, packed
from tests.support.data.queries import route_query
from tests.support.worlds.told_fleet import ToldFleet, clock_of, told_fleet

Capture = pytest.CaptureFixture[str]


async def a_fleet() -> tuple[ToldFleet, int]:
    """Three workers; and the position from which on each kind of fact changes."""
    told = await told_fleet()
    await told.join("w1", "w2", "w3")
    await told.tell("kv", "w1", BlocksStored(0, packed(1, 2)))
    await told.report("w1", 1, 0, 7)
    before = told.state.position
    await clock_of(told).advance(60)
    await told.tell("fleet", "w1", WorkerChanged("w1", 1, "paused", "decode", ("a",), ("batch",)))
    await told.tell("kv", "w1", BlocksStored(0, packed(3)))
    await told.report("w1", 2, 3, 9, step_us=5_000, gaps=1)
    await told.tell("fleet", "w2", WorkerLeft("w2", 1, "stopped"))
    await told.tell("fleet", "w3", WorkerDraining("w3", 1))
    await told.tell("kv", "w3", KvGap(2))
    await told.join("w4")
    await told.tell("fleet", "r1", EnginesWeighted({"sim": 2.0}))
    await told.decide(route_query("a-0-1", 33, pinned="w4"))
    return told, before


async def test_every_fact_that_differs_is_listed() -> None:
    """And nothing else; with the events between, by kind and name."""
    told, before = await a_fleet()
    found = await compare(told.ports, "p", str(before), "end")
    assert {(one.worker, one.fact): (one.before, one.after) for one in found.changes} == {
        ("", "engine weights"): ({}, {"sim": 2.0}),
        ("", "distinct blocks"): (2, 3),
        ("w1", "state"): ("ready", "paused"),
        ("w1", "role"): ("both", "decode"),
        ("w1", "adapters"): ((), ("a",)),
        ("w1", "taints"): ((), ("batch",)),
        ("w1", "running"): (1, 2),
        ("w1", "waiting"): (0, 3),
        ("w1", "used blocks"): (7, 9),
        ("w1", "cached blocks"): (2, 3),
        ("w1", "step ms"): (0.0, 5.0),
        ("w2", "present"): (True, False),
        ("w3", "state"): ("ready", "draining"),
        ("w3", "cache known"): (True, False),
        ("w4", "present"): (False, True),
    }
    assert found.after == facts_of(told.state)
    assert found.after.workers["w4"]["requests"] == 1
    assert found.events == {
        ("fleet", "fleet.changed"): 1,
        ("fleet", "fleet.left"): 1,
        ("fleet", "fleet.draining"): 1,
        ("fleet", "fleet.joined"): 1,
        ("fleet", "fleet.weighted"): 1,
        ("kv", "kv.stored"): 1,
        ("kv", "kv.gap"): 1,
        ("kv", "kv.cleared"): 1,
        ("load", "load.reported"): 1,
        ("route", "route.decided"): 1,
    }


async def test_a_new_incarnation_is_another_epoch() -> None:
    """Its cache is empty again."""
    told, before = await a_fleet()
    await told.tell("fleet", "w1", joined("w1", 5), epoch=5)
    found = await compare(told.ports, "p", str(before), "end")
    assert ("w1", "epoch", 1, 5) in found.changes
    assert ("w1", "cached blocks", 2, 0) in found.changes


async def test_both_states_continue_snapshots(capsys: Capture) -> None:
    """Also when the log before is gone; without one, it is told that something is missing."""
    told, before = await a_fleet()
    whole = await compare(told.ports, "p", str(before), "end")
    assert isinstance(told.log, MemoryLog)
    told.log.purge(before)
    lacking = await compare(told.ports, "p", str(before), "end")
    assert lacking.before.workers.keys() < whole.before.workers.keys()
    assert f"positions 1 to {before - 1} are gone" in capsys.readouterr().err
    rest = await told_fleet()
    await rest.join("w1", "w2", "w3")
    await rest.tell("kv", "w1", BlocksStored(0, packed(1, 2)))
    store = SnapshotStore(told.ports.blobs, "p")
    rest.state.log = await told.log.identity()
    await store.save(rest.state.snapshot())
    assert await compare(told.ports, "p", str(before), "end") == whole
    assert capsys.readouterr().err == ""


async def test_it_is_a_table_or_an_object(capsys: Capture) -> None:
    told, before = await a_fleet()
    assert await show(told.ports, "p", str(before), "end") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"pool p, from position {before} (2027-01-15T08:00:00.000Z) to ")
    assert "\nw2 left: epoch 1, ready, both on sim, running 0," in text
    assert "\nw4 joined: epoch 1, ready, both on sim, running 0, waiting 0, 1 requests" in text
    assert [line.split() for line in text.splitlines() if "cached" in line and "w1" in line] == [
        ["w1", "cached", "blocks", "2", "3"]
    ]
    assert await show(told.ports, "p", str(before), "end", as_json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"worker": "w1", "fact": "waiting", "before": 0, "after": 3} in data["changes"]
    assert data["events"]["kv.gap"] == 1
    assert await show(told.ports, "p", "end", "end") == 0
    assert capsys.readouterr().out.endswith("\nnothing that is compared differs\nno events between them\n")


async def test_places_in_the_wrong_order_are_told() -> None:
    told, _ = await a_fleet()
    with pytest.raises(ConfigError, match="A is position 9 and B is 2, which is before it"):
        await compare(told.ports, "p", "9", "2")
    with pytest.raises(ConfigError, match="A yesterday: expected a position"):
        await compare(told.ports, "p", "yesterday", "2")
