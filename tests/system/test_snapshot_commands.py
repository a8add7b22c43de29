"""`headwater snapshots` and `headwater replay --from` against a server with a real pool log."""

import json
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from headwater.actors.runtime.ports import Ports
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.server import open_ports
from headwater.ops.operator.log import name, snapshots
from headwater.ops.operator.replay import replay
from headwater.router.state import RouterState
from headwater.schemas.subjects import snapshot_name
from tests.support.data.story import fold, story
from tests.support.ports.logs import append_one
from tests.support.servers.nats import NatsServer

RECORDS = 60


class Case(NamedTuple):
    """A pool log of 60 messages and snapshots at 20 and 40. `whole`: the digest of all of it."""

    nats: NatsSettings
    world: Ports
    store: SnapshotStore
    whole: str


@pytest.fixture
async def case(server: NatsServer, unique: str) -> AsyncIterator[Case]:
    """A namespace of its own."""
    async with open_ports(server.url, unique, "test") as world:
        log = await world.pool_log("p")
        store = SnapshotStore(world.blobs, "p")
        state = RouterState()
        for number, record in enumerate(story(5, RECORDS), 1):
            await append_one(log, f"hw.{unique}.pool.p.kv.s{number}", record.batch)
            fold([record], state)
            if number in (20, 40):
                await store.save(state.snapshot(made_ns=world.clock.wall_ns() - 90_000_000_000))
        nats = NatsSettings(server.url, namespace=unique)
        yield Case(nats, world, store, state.digest())


async def test_the_listing_for_programs_has_the_same(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """And tells what is unreadable."""
    await case.store.bookmarks.put("before", 20)
    old, new = await case.store.listing()
    assert old.manifest is not None
    await case.world.blobs.put(snapshot_name("p", 40), b"no manifest")
    assert await snapshots(case.nats, "p", as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["pool"], shown["bookmarks"]) == ("p", {"before": 20})
    first, second = shown["snapshots"]
    assert first == {
        "position": 20,
        "bytes": old.size,
        "made_ns": old.manifest.made_ns,
        "blocks": old.manifest.facts["rows"],
        "digest": old.manifest.digest,
    }
    assert second["position"] == new.position
    assert second["problem"]


async def test_the_listing_shows_what_is_kept(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Position, age, bytes, blocks, digest and bookmarks; what is unreadable; bookmarks that lost theirs."""
    await case.store.bookmarks.put("before", 20)
    await case.store.bookmarks.put("lost", 7)
    assert await snapshots(case.nats, "p") == 0
    shown = capsys.readouterr().out
    old, new = await case.store.listing()
    for kept, bookmark in ((old, "before"), (new, "")):
        assert kept.manifest is not None
        line = next(line for line in shown.splitlines() if line.split()[0] == str(kept.position))
        told = (f"{kept.size:,}", str(kept.manifest.facts["rows"]), kept.manifest.digest, bookmark)
        assert line.split() == [str(kept.position), "1.5", "min", *(one for one in told if one)]
    assert "bookmarks without their snapshot: lost" in shown
    await case.world.blobs.put(snapshot_name("p", 40), b"garbage")
    assert await snapshots(case.nats, "p") == 0
    assert "unreadable" in capsys.readouterr().out


async def test_a_bookmark_keeps_the_newest_or_the_one_asked_for(case: Case) -> None:
    """It outlives all later snapshots, until it is dropped."""
    await snapshots(case.nats, "p", bookmark="incident")
    await snapshots(case.nats, "p", bookmark="older", position=20)
    assert await case.store.bookmarks.all() == {"incident": 40, "older": 20}
    state = fold(story(5, RECORDS))
    for position in (58, 59, 60):
        state.position = position
        await case.store.save(state.snapshot())
    assert await case.store.positions() == [20, 40, 59, 60]
    await snapshots(case.nats, "p", drop="older")
    state.position = 61
    await case.store.save(state.snapshot())
    assert await case.store.positions() == [40, 60, 61]


async def test_what_can_not_be_named_or_dropped_is_told(case: Case) -> None:
    """With what there is instead."""
    with pytest.raises(ConfigError, match="--position 21: there are snapshots at 20, 40"):
        await snapshots(case.nats, "p", bookmark="x", position=21)
    with pytest.raises(ConfigError, match=r"bookmark 'a\.b' is not a valid name"):
        await snapshots(case.nats, "p", bookmark="a.b")
    with pytest.raises(ConfigError, match="--drop x: no such bookmark; there are none"):
        await snapshots(case.nats, "p", drop="x")
    with pytest.raises(ConfigError, match="no snapshot yet"):
        await name(SnapshotStore(case.world.blobs, "empty"), "x")
    await case.world.blobs.put(snapshot_name("p", 40), b"garbage")
    with pytest.raises(ConfigError, match="--position 40: the snapshot is unreadable"):
        await snapshots(case.nats, "p", bookmark="x")
    assert await case.store.bookmarks.all() == {}


async def test_replay_starts_at_a_bookmark(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """The same state as from the start of the log, with less to read."""
    await snapshots(case.nats, "p", bookmark="b", position=20)
    capsys.readouterr()
    for bookmark, start in (("", 1), ("b", 21)):
        assert await replay(case.nats, "p", verify=False, bookmark=bookmark) == 0
        shown = capsys.readouterr().out
        assert f"positions {start} to {RECORDS}," in shown
        assert case.whole in shown


async def test_replay_from_what_is_not_there_is_told(case: Case) -> None:
    """No such bookmark, a snapshot that is gone or broken, a log that does not go on from it."""
    await snapshots(case.nats, "p", bookmark="b", position=20)
    with pytest.raises(ConfigError, match="--from c: no such bookmark; there are: b"):
        await replay(case.nats, "p", verify=False, bookmark="c")
    await case.store.bookmarks.put("far", 999)
    with pytest.raises(ConfigError, match="--from far: it names position 999, and the log holds 1 to 60"):
        await replay(case.nats, "p", verify=False, bookmark="far")
    await case.world.blobs.put(snapshot_name("p", 20), b"garbage")
    with pytest.raises(ConfigError, match="--from b: the snapshot at 20 is unreadable"):
        await replay(case.nats, "p", verify=False, bookmark="b")
