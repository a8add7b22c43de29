"""`headwater tree` against a server with a real pool log and a snapshot in the middle of it."""

import json

import pytest

from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.sections import NatsSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.server import open_ports
from headwater.ops.operator.log import show_tree
from headwater.router.index.tree import text, tree
from headwater.router.state import RouterState
from tests.support.data.story import fold, story
from tests.support.ports.logs import append_one
from tests.support.servers.nats import NatsServer


async def test_the_tree_is_that_of_snapshot_and_tail(
    server: NatsServer, unique: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same as that of a fold of everything; for people and for programs; with a word about a wrong worker."""
    async with open_ports(server.url, unique, "test") as world:
        log = await world.pool_log("p")
        state = RouterState()
        for number, record in enumerate(story(5, 60), 1):
            await append_one(log, f"hw.{unique}.pool.p.kv.s{number}", record.batch)
            fold([record], state)
            if number == 30:
                await SnapshotStore(world.blobs, "p").save(state.snapshot())
    nats = NatsSettings(server.url, namespace=unique)
    assert state.index.rows > 5
    assert await show_tree(nats, "p", worker="", depth=-1, limit=50, as_json=False) == 0
    assert capsys.readouterr().out.startswith(f"pool p at position 60: {text(tree(state.index))}\n")
    worker = min(state.index.slots)
    assert await show_tree(nats, "p", worker=worker, depth=3, limit=2, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["pool"], shown["position"]) == ("p", 60)
    assert [run["first"] for run in shown["tree"]["runs"]] == [
        run.first for run in tree(state.index, worker=worker, depth=3, limit=2).runs
    ]
    with pytest.raises(ConfigError, match="--worker: no worker w9"):
        await show_tree(nats, "p", worker="w9", depth=-1, limit=50, as_json=False)
