"""The operator's keeper on a real server: the log of a pool is there as long as its card is, whoever deletes what."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import pytest
from nats.aio.client import Client

from headwater.events.jetstream import Connection, JetStreamTable
from headwater.events.jetstream.api import api
from headwater.events.jetstream.streams import ensure_namespace, stream_names
from headwater.events.ports import LogError
from headwater.events.table import StreamSizes
from headwater.ops.start.actor import keep_namespace, keep_pools
from headwater.schemas import subjects
from tests.support.worlds.clock import running
from tests.unit.engines.vllm.test_checks import card

WITHIN_S = 20.0
SIZES = StreamSizes(1 << 20)


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Wait until something is true of the server."""
    async with asyncio.timeout(WITHIN_S):
        while not await holds():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("lost", ["log", "cards", "all"])
async def test_the_log_of_a_pool_is_made_again(client: Client, unique: str, lost: str) -> None:
    """The log alone, with its card unchanged; the cards, which a worker writes again; and everything at once."""
    present = card(unique)
    log, bucket = subjects.pool_stream(unique, present.pool), subjects.card_bucket(unique)
    cards = JetStreamTable(client, bucket)

    async def made() -> bool:
        return log in await stream_names(client, log)

    async def written() -> bool:
        try:
            await cards.put(subjects.card_key(present.pool), msgspec.json.encode(present))
        except LogError:
            return False
        return True

    await ensure_namespace(client, unique, sizes=SIZES)
    try:
        operator = cast("Connection", client)
        keepers = keep_namespace(operator, unique, 1, SIZES), keep_pools(operator, unique, 1)
        async with running(keepers[0]), running(keepers[1]):
            assert await written()
            await until(made)
            for _ in range(2):
                streams = {"log": [log], "cards": [subjects.table_stream(bucket), log]}
                whole = await stream_names(client, "")
                for name in streams.get(lost, [one for one in whole if unique in one]):
                    await api(client, f"STREAM.DELETE.{name}")
                if lost != "log":
                    await until(written)
                await until(made)
    finally:
        for name in await stream_names(client, ""):
            if unique in name:
                await api(client, f"STREAM.DELETE.{name}")
