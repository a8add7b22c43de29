"""Writing and reading the logs as actors do, each with the rights of its kind only: nothing is denied, or all at once."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from headwater.events.jetstream import JetStreamBlobs, JetStreamLog
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import pool_log_stream
from headwater.events.jetstream.streams import ensure, ensure_namespace, ensure_pool, survey
from headwater.events.ports import AccessDenied, Entry, Stored, StreamMissing
from headwater.events.snapshot_store import KEEP, Snapshot, SnapshotStore
from headwater.schemas import subjects
from headwater.schemas.encoding import Sealed, seal
from tests.support.ports.guarded import NS, POOL, Guarded
from tests.support.ports.logs import batch, read_all, records_of, stored

STREAM = subjects.pool_stream(NS, POOL)
REQUESTS = subjects.request_stream(NS)
CHUNK_BYTES = 1 << 20


def event(kind: subjects.PoolKind, writer: str = "me") -> str:
    """Where a writer's events of a kind go."""
    return subjects.pool_subject(NS, POOL, kind, writer)


def messages(count: int, writer: str = "me") -> list[Sealed]:
    """Numbered from 1."""
    return [seal(batch(seq, writer=writer)) for seq in range(1, count + 1)]


async def test_a_worker_streams_its_events(guarded: Guarded) -> None:
    """Single, atomic and fast-ingest: every acknowledgement comes to the private inbox, flow acks between too."""
    async with guarded.as_("worker") as worker:
        log = JetStreamLog(worker, STREAM)
        assert await stored(log, event("fleet"), batch(1, writer="me")) == 1
        together = [Entry(event("kv"), one) for one in messages(3)]
        assert await log.append(*together) == Stored(4)
        many = messages(1000)[3:]
        assert await log.ingest(event("kv"), *many, fence=event("fleet")) == Stored(1001)
        assert await log.ingest(event("kv"), *many[-5:], fence=event("fleet")) == Stored(1001, again=True)
        assert (await log.newest(event("kv"))).seq == 1000
    assert guarded.server.violations() == []


async def test_an_edge_takes_up_its_request_log(guarded: Guarded) -> None:
    """What an earlier life wrote is read at the start of the next one."""
    subject = subjects.request_subject(NS, "me")
    for epoch in (1, 2):
        async with guarded.as_("edge") as edge:
            log = JetStreamLog(edge, REQUESTS)
            assert (await log.newest(subject)).epoch == epoch - 1
            assert [record.batch.epoch for record in await records_of(log)] == [1] * (epoch - 1)
            await stored(log, subject, batch(1, writer="me", epoch=epoch))
    assert guarded.server.violations() == []


async def test_a_router_folds_and_keeps_snapshots(guarded: Guarded) -> None:
    """The log, what retention will take of it, which one it is; snapshots in chunks, pruned but for named ones."""
    async with guarded.as_("router") as router, guarded.as_("operator") as operator:
        log = JetStreamLog(router, STREAM)
        await stored(log, event("route"), batch(1, writer="me"))
        assert [record.position for record in await records_of(log)] == [1]
        assert await log.identity()
        assert (await log.retention(0)).last == 1
        blobs = JetStreamBlobs(router, subjects.blob_bucket(NS))
        store = SnapshotStore(blobs, POOL, chunk_bytes=CHUNK_BYTES)
        table = np.arange(3 * CHUNK_BYTES // 16, dtype=np.uint64)
        positions = range(1, KEEP + 3)
        for position in positions:
            await store.save(Snapshot(position, {}, {"table": table}, "d", 1))
            if position == 1:
                named = SnapshotStore(JetStreamBlobs(operator, subjects.blob_bucket(NS)), POOL)
                await named.bookmarks.put("first", position)
        assert await store.positions() == [1, *positions[-KEEP:]]
        found = await store.newest(lambda _: True)
        assert found is not None
        assert np.array_equal(found.arrays["table"], table)
        assert await store.bookmarks.all() == {"first": 1}
        assert await store.bookmarks.drop("first")
    assert guarded.server.violations() == []


async def test_two_workers_may_store_one_file(guarded: Guarded) -> None:
    """The later one replaces the earlier one's object, and leaves no bytes behind."""
    async with guarded.as_("worker") as worker:
        blobs = JetStreamBlobs(worker, subjects.blob_bucket(NS))
        for _ in range(2):
            await blobs.put(subjects.artifact_name("d"), b"tokenizer")
        assert await blobs.has(subjects.artifact_name("d"))
        info = await api(worker, f"STREAM.INFO.OBJ_{subjects.blob_bucket(NS)}")
        assert info["state"]["messages"] == 2
    assert guarded.server.violations() == []


LONG_S = 60.0
"""A deadline that is never waited for, on the busiest machine."""


async def test_a_denied_batch_fails_at_once_and_by_name(guarded: Guarded) -> None:
    """Whichever of its messages is denied: no deadline is waited for, and nothing is stored."""
    good, bad = event("fleet"), event("route")
    three = messages(3)
    async with guarded.as_("worker") as worker:
        log = JetStreamLog(worker, STREAM)
        attempts: list[Callable[[], Awaitable[object]]] = [
            partial(log.ingest, bad, *messages(500), fence=good, deadline_s=LONG_S),
            partial(log.append, *(Entry(bad, one) for one in three), deadline_s=LONG_S),
            partial(log.append, Entry(bad, three[0]), Entry(good, three[1]), deadline_s=LONG_S),
            partial(log.append, Entry(good, three[0]), Entry(bad, three[1]), deadline_s=LONG_S),
        ]
        for attempt in attempts:
            async with asyncio.timeout(LONG_S):
                with pytest.raises(AccessDenied, match="nats-config") as caught:
                    await attempt()
            assert bad in str(caught.value)
        assert (await log.bounds()).last == 0


async def test_actors_leave_a_stream_that_differs_to_the_operator(guarded: Guarded) -> None:
    """They say so and start nevertheless; the operator alters it."""
    spec = msgspec.structs.replace(pool_log_stream(NS, "old", 1), allow_atomic=False, allow_batched=False)
    async with guarded.as_("operator") as operator, guarded.as_("router") as router:
        await ensure(operator, spec)
        with capture_logs() as logs:
            await ensure_pool(router, NS, "old", alter=False)
        assert [(entry["event"], entry["stream"]) for entry in logs] == [("stream_differs", spec.name)]
        assert "headwater streams --repair" in logs[0]["reason"]
        await ensure_pool(operator, NS, "old")
        with capture_logs() as logs:
            await ensure_pool(router, NS, "old", alter=False)
        assert logs == []
    assert guarded.server.violations() == []


async def test_an_observer_surveys_streams_and_reads_logs(guarded: Guarded) -> None:
    """It changes nothing, and is denied nothing while all streams are there."""
    async with guarded.as_("observer") as observer:
        await ensure_namespace(observer, NS, alter=False)
        assert all(one.whole for one in await survey(observer, NS, 1))
        assert await read_all(JetStreamLog(observer, STREAM))
        assert guarded.server.violations() == []
        with pytest.raises(StreamMissing, match="headwater pools"):
            await ensure_pool(observer, NS, "other", alter=False)
