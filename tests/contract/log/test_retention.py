"""What a log tells of what it holds and may hold, and that the server really cuts at its limits."""

import asyncio

import msgspec
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamLog
from headwater.events.jetstream.api import api, publish
from headwater.events.jetstream.stream_spec import POOL_MAX_AGE_S, pool_log_stream
from headwater.events.jetstream.streams import repair
from headwater.events.ports import Log, Retention
from headwater.events.snapshot_store import forgotten, snapshot_due
from headwater.events.table import POOL_BYTES_MAX
from tests.support.ports.logs import LogCase, batch, stored
from tests.support.ports.waiting import POLL_S

PAUSE_S = 0.3


async def test_an_empty_log_has_nothing_to_forget(log_case: LogCase) -> None:
    """No message, no age, and no snapshot is due."""
    held = await log_case.log.retention(0)
    assert (held.first, held.last, held.bytes, held.next_age_s) == (1, 0, 0, 0.0)
    assert snapshot_due(held, 0) == ""


async def test_the_age_is_that_of_the_first_message_behind(log_case: LogCase) -> None:
    """It falls with the position asked for, is nothing at the end, and passes over what is purged."""
    for seq in range(1, 6):
        await stored(log_case.log, log_case.subject, batch(seq))
    # Asked from the newest on: each is older than the one before, and is looked at later.
    ages = [(await log_case.other.retention(after)).next_age_s for after in (5, 4, 3, 2, 1, 0)]
    assert ages[0] == 0.0
    assert ages == sorted(ages)
    assert ages[-1] > 0.0
    await log_case.purge(4)
    held = await log_case.log.retention(0)
    assert (held.first, held.last) == (4, 5)
    assert held.next_age_s > 0.0
    assert held.bytes > 0
    assert snapshot_due(held, 2)
    assert not snapshot_due(held, 3)


async def test_the_message_at_the_position_itself_does_not_count(log_case: LogCase) -> None:
    """With a pause before the last message, the age behind its neighbour is that of the last."""
    await stored(log_case.log, log_case.subject, batch(1))
    await stored(log_case.log, log_case.subject, batch(2))
    async with asyncio.timeout(30):
        while (await log_case.log.retention(1)).next_age_s < PAUSE_S:
            await asyncio.sleep(POLL_S)
    await stored(log_case.log, log_case.subject, batch(3))
    last = await log_case.log.retention(2)
    before = await log_case.log.retention(1)
    assert before.next_age_s - last.next_age_s >= PAUSE_S


async def test_limits_are_told_as_configured(client: Client, unique: str) -> None:
    """Those of the pool log, and an operator's; none is 0."""
    spec = pool_log_stream(unique, "p", 1)
    await repair(client, spec)
    log: Log = JetStreamLog(client, spec.name)
    held = await log.retention(0)
    assert (held.max_bytes, held.max_messages, held.max_age_s) == (POOL_BYTES_MAX, 0, POOL_MAX_AGE_S)
    config = (await api(client, f"STREAM.INFO.{spec.name}"))["config"]
    change = {"max_bytes": -1, "max_age": 0, "max_msgs": 7}
    await api(client, f"STREAM.UPDATE.{spec.name}", config | change)
    held = await log.retention(0)
    assert (held.max_bytes, held.max_messages, held.max_age_s) == (0, 7, 0.0)
    await api(client, f"STREAM.DELETE.{spec.name}")


async def test_a_snapshot_when_due_keeps_ahead_of_the_servers_cut(client: Client, unique: str) -> None:
    """A small log written round several times: with the due snapshots it can always be continued, without not."""
    spec = msgspec.structs.replace(pool_log_stream(unique, "p", 1), max_bytes=100_000)
    await repair(client, spec)
    log = JetStreamLog(client, spec.name)
    saved = due = 0
    for number in range(600):
        await publish(client, f"hw.{unique}.pool.p.kv.w", b"x" * (200 + number % 5 * 200), {}, 5.0)
        if number % 20 == 0:
            held: Retention = await log.retention(saved)
            if snapshot_due(held, saved):
                saved, due = held.last, due + 1
        if number % 50 == 0:
            assert forgotten(*(await log.bounds()), saved) == ""
    assert forgotten(*(await log.bounds()), 0)
    assert 5 < due < 30
    await api(client, f"STREAM.DELETE.{spec.name}")
