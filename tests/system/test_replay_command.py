"""`headwater replay` against a server: parts of a log, as text and as JSON, and what differs."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headwater.events.ports import Log
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.config.setting import ConfigError
from headwater.ops.operator.replay import replay
from headwater.router.state import RouterState, in_order
from headwater.schemas.encoding import SCHEMA_VERSION, Batch
from headwater.schemas.routing import Decision
from headwater.schemas.subjects import pool_subject
from tests.bench.large_log import POOL
from tests.support.ports.logs import append_one
from tests.support.servers.nats import NatsServer
from tests.support.worlds.made_up_log import MadeUpLog, made_up_log


@pytest.fixture
async def case(server: NatsServer, unique: str) -> AsyncIterator[MadeUpLog]:
    """5,000 events, and a bookmark at the snapshot."""
    async with made_up_log(server, unique, 2_000, 3_000) as made:
        await SnapshotStore(made.ports.blobs, POOL).bookmarks.put("b", made.snapshot)
        yield made


async def state_at(log: Log, position: int) -> RouterState:
    """The fold up to a position."""
    state = RouterState()
    async for piece in log.scan(0, position):
        for message in in_order(piece):
            state.apply(message)  # type: ignore[arg-type]
    return state


async def test_a_replay_ends_at_a_position_or_a_time(
    case: MadeUpLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the state that the fold had there, from the log's start and from a bookmark."""
    position = case.snapshot + 333
    state = await state_at(case.log, position)
    [message] = [one async for run in case.log.scan_raw(position - 1, position) for one in run]
    at = f"{message.stored_ns // 1_000_000_000}.{message.stored_ns // 1_000 % 1_000_000 + 1:06}"
    assert abs(await case.log.position_at(message.stored_ns + 1_000) - position) < 30
    for until, bookmark in ((str(position), ""), (str(position), "b"), (at, "")):
        capsys.readouterr()
        assert await replay(case.nats, "", verify=True, bookmark=bookmark, until=until, as_json=True) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["first"] == (case.snapshot + 1 if bookmark else 1)
        assert data["equal"]
        assert data["verified"] == data["decisions"] > 0
        if until == str(position):
            assert (data["last"], data["state"]) == (position, state.digest())
        assert await replay(case.nats, "", verify=False, bookmark=bookmark, until=until) == 0
        shown = capsys.readouterr().out
        assert f"positions {data['first']} to {data['last']}, {data['events']} events" in shown
        assert data["state"] in shown


async def test_an_end_that_is_not_there_is_told(case: MadeUpLog) -> None:
    """Beyond the log, before the bookmark, and what is neither position nor time."""
    for until, bookmark, text in (
        ("999999", "", "--until 999999: the log holds positions 1 to"),
        ("2001-01-01", "", "--until 2001-01-01: the log holds positions 1 to"),
        ("soon", "", "--until soon: it is neither a position nor a time"),
        ("5", "b", f"--until 5: the replay begins at position {case.snapshot}"),
    ):
        with pytest.raises(ConfigError, match=text):
            await replay(case.nats, "", verify=False, bookmark=bookmark, until=until)


async def test_a_decision_that_differs_ends_the_replay_with_1(
    case: MadeUpLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what differs; without verification it is an event like others."""
    decisions = [
        event
        async for piece in case.log.scan(0, case.fleet.state.position)
        for record in piece.records
        for event in record.batch.events
        if isinstance(event, Decision)
    ]
    last = decisions[-1]
    forged = msgspec.structs.replace(
        last,
        number=1,
        seen=0,
        position=case.fleet.state.position,
        request="forged",
        worker=last.candidates[0].worker,
        seed=last.seed + 1,
    )
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "r2", 7, 1, 0, (forged,))
    await append_one(case.log, pool_subject(case.nats.namespace, POOL, "route", "r2"), batch)
    capsys.readouterr()
    assert await replay(case.nats, "", verify=True) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("DIFFERENT: decision 1 of r2 (epoch 7) for forged")
    assert await replay(case.nats, "", verify=True, as_json=True) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["equal"]
    assert data["difference"]["text"] in shown
    assert await replay(case.nats, "", verify=False) == 0
    assert await replay(case.nats, "", verify=True, until=str(case.fleet.state.position)) == 0
