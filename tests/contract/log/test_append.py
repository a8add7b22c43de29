"""The `Log` contract on writing several messages: atomic appends over subjects, and streams behind a fence.

Each check runs over memory and over real servers with both ack formats, and, shortly, over three replicas.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamLog
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import log_stream
from headwater.events.jetstream.streams import ensure, ensure_pool
from headwater.events.ports import (
    ATOMIC_MESSAGES_MAX,
    NOTHING,
    Entry,
    Fenced,
    Log,
    LogFull,
    Newest,
    Stored,
    Unknown,
)
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, Sealed, seal
from headwater.schemas.events import BlocksStored
from headwater.schemas.subjects import pool_stream, pool_subject
from tests.support.ports.logs import POOL, LogCase, batch, connected, records_of
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster


class Logs(NamedTuple):
    """One log, seen by two processes, and its subjects by kind."""

    log: Log
    other: Log
    stem: str

    def subject(self, kind: str, writer: str = "w0") -> str:
        """A subject of the log."""
        return self.stem.replace(".load.w0", f".{kind}.{writer}")


Check = Callable[[Logs], Awaitable[None]]
CHECKS: list[Check] = []


def check(one: Check) -> Check:
    """Register a check."""
    CHECKS.append(one)
    return one


def sealed(seq: int, *, epoch: int = 1) -> Sealed:
    """A small message."""
    return seal(batch(seq, epoch=epoch))


def sealed_all(first: int, last: int, *, epoch: int = 1) -> list[Sealed]:
    """Messages `first` to `last` of a life."""
    return [sealed(seq, epoch=epoch) for seq in range(first, last + 1)]


async def surely(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Again after each `Unknown`, as every writer does."""
    while isinstance(result := await attempt(), Unknown):
        pass
    return result


async def stored_in(log: Log, subject: str) -> list[tuple[int, int]]:
    """(epoch, seq) of the messages of a subject."""
    return [(r.batch.epoch, r.batch.seq) for r in await records_of(log) if r.subject == subject]


@check
async def an_append_is_stored_together(case: Logs) -> None:
    """In the order given, at consecutive positions, over several subjects; and again is not stored again."""
    fleet, kv, load = (case.subject(kind) for kind in ("fleet", "kv", "load"))
    entries = [
        Entry(fleet, sealed(1)),
        Entry(kv, sealed(1)),
        Entry(kv, sealed(2)),
        Entry(load, sealed(1)),
        Entry(kv, sealed(3)),
    ]
    assert await case.log.append(*entries) == Stored(5)
    for log in (case.log, case.other):
        assert await log.append(*entries) == Stored(5, again=True)
    found = [(one.position, one.subject, one.batch.seq) for one in await records_of(case.log)]
    assert found == [(at, entry.subject, entry.message.seq) for at, entry in enumerate(entries, start=1)]
    last = entries[-1].message
    assert await case.other.newest(kv) == Newest(5, "w0", 1, 3, last.digest)
    assert await case.other.newest(case.subject("kv", "w9")) == NOTHING


@check
async def any_of_its_subjects_fences_an_append(case: Logs) -> None:
    """A later life in one of them: nothing of it is stored, in none. Whoever asked before, whoever did not."""
    fleet, kv, load = (case.subject(kind) for kind in ("fleet", "kv", "load"))
    first = [Entry(name, sealed(1, epoch=5)) for name in (fleet, kv, load)]
    assert isinstance(await case.log.append(*first), Stored)
    assert isinstance(await case.other.append(Entry(load, sealed(1, epoch=9))), Stored)
    for order in ([fleet, kv, load], [load, kv, fleet], [kv, load, fleet]):
        entries = [Entry(name, sealed(2, epoch=5)) for name in order]
        for log in (case.log, case.other):
            assert await log.append(*entries) == Fenced(9)
    assert len(await records_of(case.log)) == 4
    assert isinstance(await case.log.append(Entry(fleet, sealed(2, epoch=5))), Stored), "not its subject"


@check
async def concurrent_appends_of_common_subjects_all_get_in(case: Logs) -> None:
    """Whatever order each names them in, from two processes: none waits for ever, each is whole."""
    names = [case.subject(kind) for kind in ("fleet", "kv", "load", "route")]

    async def write(number: int) -> Any:
        log = case.log if number % 2 else case.other
        # Lives of its own, so that no order among them is needed: a later one only fences.
        picked = [names[number % 4], names[(number * 3 + 1) % 4], names[(number * 2 + 2) % 4]]
        entries = [Entry(name, sealed(1, epoch=number)) for name in dict.fromkeys(picked)]
        return number, len(entries), await surely(lambda: log.append(*entries))

    async with asyncio.timeout(30):
        results = await asyncio.gather(*(write(number) for number in range(1, 41)))
    assert all(isinstance(result, Stored | Fenced) for _, _, result in results)
    records = await records_of(case.log)
    wanted = {number: size for number, size, result in results if isinstance(result, Stored)}
    assert 40 in wanted
    for number, size in wanted.items():
        at = [record.position for record in records if record.batch.epoch == number]
        assert len(at) == size, number
        assert at == list(range(at[0], at[0] + size)), "together"
    assert {record.batch.epoch for record in records} == set(wanted), "of a fenced one nothing"
    for name in names:
        epochs = [epoch for epoch, _ in await stored_in(case.log, name)]
        assert epochs == sorted(epochs)


@check
async def appends_that_name_subjects_in_another_order_do_not_deadlock(case: Logs) -> None:
    """Of one process: every call gets its answer at once, none waits out its deadline."""
    names = [case.subject(kind) for kind in ("kv", "fleet")]

    async def write(number: int) -> Any:
        order = names if number % 2 else names[::-1]
        return await case.log.append(*(Entry(name, sealed(number)) for name in order))

    results = await asyncio.gather(*(write(number) for number in range(1, 21)))
    assert all(isinstance(result, Stored) and not result.again for result in results), results
    for name in names:
        assert await stored_in(case.log, name) == [(1, seq) for seq in range(1, 21)]


@check
async def too_many_at_once_are_refused(case: Logs) -> None:
    """Before anything is sent."""
    many = sealed_all(1, ATOMIC_MESSAGES_MAX + 1)
    with pytest.raises(ValueError, match="1000"):
        await case.log.append(*(Entry(case.stem, message) for message in many))
    with pytest.raises(ValueError, match="1 to 1000"):
        await case.log.append()
    with pytest.raises(ValueError, match="1000"):
        await case.log.ingest(case.stem, *many, fence=case.subject("fleet"))
    with pytest.raises(ValueError, match="1 to 1000"):
        await case.log.ingest(case.stem, fence=case.subject("fleet"))
    assert await records_of(case.log) == []


@check
async def as_many_as_allowed_are_stored(case: Logs) -> None:
    """The bound itself is no error, either way."""
    many = sealed_all(1, ATOMIC_MESSAGES_MAX)
    kv = case.subject("kv")
    assert await surely(lambda: case.log.append(*(Entry(kv, one) for one in many))) == Stored(1000)
    more = sealed_all(1, ATOMIC_MESSAGES_MAX)
    assert isinstance(
        await surely(lambda: case.log.ingest(case.stem, *more, fence=case.subject("fleet"))), Stored
    )
    assert await stored_in(case.log, case.stem) == [(1, seq) for seq in range(1, 1001)]


@check
async def an_ingest_is_in_order_without_holes(case: Logs) -> None:
    """Behind a life's beginning; repeated it is told to be there, and behind a stored prefix it goes on."""
    fleet, kv = case.subject("fleet"), case.subject("kv")
    assert isinstance(await case.log.append(Entry(fleet, sealed(1))), Stored)
    done = await surely(lambda: case.log.ingest(kv, *sealed_all(1, 300), fence=fence_of(case)))
    assert done == Stored(301)
    for log in (case.log, case.other):
        assert await log.ingest(kv, *sealed_all(1, 300), fence=fleet) == Stored(301, again=True)
    assert await case.other.ingest(kv, *sealed_all(201, 350), fence=fleet) == Stored(351)
    assert await case.log.ingest(kv, *sealed_all(351, 351), fence=fleet) == Stored(352)
    assert await stored_in(case.log, kv) == [(1, seq) for seq in range(1, 352)]


def fence_of(case: Logs) -> str:
    """The subject that fences this writer's streams."""
    return case.subject("fleet")


@check
async def the_fence_subject_fences_an_ingest(case: Logs) -> None:
    """A later life has written there, though not to the streamed subject. Whoever asked before, whoever did not."""
    fleet, kv = case.subject("fleet"), case.subject("kv")
    await case.log.append(Entry(fleet, sealed(1, epoch=3)))
    assert isinstance(await case.log.ingest(kv, *sealed_all(1, 5, epoch=3), fence=fleet), Stored)
    assert isinstance(await case.other.append(Entry(fleet, sealed(1, epoch=4))), Stored)
    for log in (case.log, case.other):
        assert await log.ingest(kv, *sealed_all(6, 9, epoch=3), fence=fleet) == Fenced(4)
    assert isinstance(await case.other.ingest(kv, *sealed_all(1, 2, epoch=4), fence=fleet), Stored)
    assert await stored_in(case.log, kv) == [*((3, n) for n in range(1, 6)), (4, 1), (4, 2)]


@check
async def a_fence_that_moves_under_an_ingest_stops_it(case: Logs) -> None:
    """Nothing of the earlier life stands behind the later one's beginning; what is before is a prefix."""
    fleet, kv = case.subject("fleet"), case.subject("kv")
    await case.log.append(Entry(fleet, sealed(1, epoch=3)))
    begun = asyncio.Event()

    async def old() -> Any:
        for number in range(200):
            messages = sealed_all(1 + 50 * number, 50 * (number + 1), epoch=3)
            result = await surely(partial(case.log.ingest, kv, *messages, fence=fleet))
            if isinstance(result, Fenced):
                return result
            begun.set()
            await asyncio.sleep(0)
        raise AssertionError("never fenced")

    async def new() -> Stored:
        await begun.wait()
        done = await surely(lambda: case.other.append(Entry(fleet, sealed(1, epoch=4))))
        assert isinstance(done, Stored)
        return done

    async with asyncio.timeout(60):
        fenced, taken_over = await asyncio.gather(old(), new())
    assert fenced == Fenced(4)
    late = [r.position for r in await records_of(case.log) if r.subject == kv]
    assert all(position < taken_over.position for position in late)
    stored = await stored_in(case.log, kv)
    assert stored == [(3, seq) for seq in range(1, len(stored) + 1)]


@check
async def own_writes_to_the_fence_fence_nobody(case: Logs) -> None:
    """The life itself writes there while it streams: everything of both gets in."""
    fleet, kv = case.subject("fleet"), case.subject("kv")
    await case.log.append(Entry(fleet, sealed(1)))

    async def stream() -> None:
        for number in range(10):
            messages = sealed_all(1 + 20 * number, 20 * (number + 1))
            result = await surely(partial(case.log.ingest, kv, *messages, fence=fleet))
            assert isinstance(result, Stored)

    async def announce() -> None:
        for seq in range(2, 12):
            result = await surely(partial(case.log.append, Entry(fleet, sealed(seq))))
            assert isinstance(result, Stored)

    async with asyncio.timeout(60):
        await asyncio.gather(stream(), announce())
    assert await stored_in(case.log, kv) == [(1, seq) for seq in range(1, 201)]
    assert await stored_in(case.log, fleet) == [(1, seq) for seq in range(1, 12)]


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.__name__)
async def test_append(log_case: LogCase, one: Check) -> None:
    """Over memory and a single server."""
    await one(Logs(log_case.log, log_case.other, log_case.subject))


@asynccontextmanager
async def replicated(client: Client, other: Client, ns: str) -> AsyncIterator[Logs]:
    """A log of three replicas."""
    await ensure_pool(client, ns, POOL, replicas=3)
    stream = pool_stream(ns, POOL)
    try:
        yield Logs(
            JetStreamLog(client, stream), JetStreamLog(other, stream), pool_subject(ns, POOL, "load", "w0")
        )
    finally:
        await api(client, f"STREAM.DELETE.{stream}")


@pytest.mark.timeout(180)
async def test_append_with_three_replicas(tmp_path: Path) -> None:
    """All of it on one cluster: there an ingest takes the atomic path, since a leader refuses fences in a row."""
    async with NatsCluster(tmp_path) as cluster, connected(cluster) as client, connected(cluster) as other:
        await cluster.until_ready(client)
        for number, one in enumerate(CHECKS):
            async with replicated(client, other, f"r{number}") as case:
                await cluster.until_current(client, pool_stream(f"r{number}", POOL))
                await one(case)
                assert isinstance(case.log, JetStreamLog)
                if one is an_ingest_is_in_order_without_holes:
                    assert case.log._replicated


async def test_identity_is_that_of_one_log(log_case: LogCase) -> None:
    """The same for every process and whatever is appended."""
    first = await log_case.log.identity()
    await log_case.log.append(Entry(log_case.subject, sealed(1)))
    assert await log_case.other.identity() == await log_case.log.identity() == first != ""


async def test_a_log_made_anew_is_another(client: Client, server: NatsServer, unique: str) -> None:
    """Deleted and created under the same name: its identity differs, and nothing is known of the old one."""
    await ensure_pool(client, unique, POOL)
    stream, subject = pool_stream(unique, POOL), pool_subject(unique, POOL, "load", "w0")
    first = await JetStreamLog(client, stream).identity()
    await JetStreamLog(client, stream).append(Entry(subject, sealed(1)))
    await api(client, f"STREAM.DELETE.{stream}")
    await ensure_pool(client, unique, POOL)
    again = JetStreamLog(client, stream)
    assert await again.identity() != first
    assert await again.newest(subject) == NOTHING
    await api(client, f"STREAM.DELETE.{stream}")


async def test_a_full_log_says_so_either_way(client: Client, server: NatsServer, unique: str) -> None:
    """An append and an ingest raise `LogFull`, also for a batch of several; the fence stands where it stood."""
    spec = log_stream(unique, f"{unique}.>", max_age_s=60, max_bytes=4096, replicas=1)
    await ensure(client, msgspec.structs.replace(spec, discard="new"))
    log = JetStreamLog(client, unique)
    fence, kv = f"{unique}.fence", f"{unique}.kv"
    assert isinstance(await log.append(Entry(fence, sealed(1))), Stored)
    big = [
        seal(Batch(SCHEMA_VERSION, "w0", 1, seq, 0, (BlocksStored(0, bytes(8) * 256),))) for seq in (1, 2, 3)
    ]
    with pytest.raises(LogFull):
        await log.append(*(Entry(kv, one) for one in big))
    with pytest.raises(LogFull):
        await log.ingest(kv, *big, fence=fence)
    # Of an ingest a prefix may be there.
    assert (await log.newest(kv)).seq <= 2
    assert isinstance(await log.append(Entry(fence, sealed(2))), Stored)
