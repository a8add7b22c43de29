"""The table of stored responses: what expires leaves nothing, and the byte bound discards the oldest."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import JetStreamTable
from headwater.events.jetstream.api import api
from headwater.events.jetstream.stream_spec import stored_stream
from headwater.events.jetstream.streams import ensure
from headwater.schemas import subjects
from tests.support.ports.logs import connected
from tests.support.servers.nats import NatsServer

BYTES = 1024 * 1024


class StoredTable:
    """A table on a real server, and the state of its stream."""

    def __init__(self, client: Client, bucket: str) -> None:
        self._client = client
        self._name = subjects.table_stream(bucket)
        self.table = JetStreamTable(client, bucket)

    async def messages(self) -> int:
        """Messages in the stream, markers of deletion included."""
        info = await api(self._client, f"STREAM.INFO.{self._name}")
        return int(info["state"]["messages"])

    async def bytes(self) -> int:
        """Size of the stream."""
        info = await api(self._client, f"STREAM.INFO.{self._name}")
        return int(info["state"]["bytes"])


@pytest.fixture
async def stored(server: NatsServer, unique: str) -> AsyncIterator[StoredTable]:
    """An empty table of stored responses."""
    async with connected(server) as client:
        await ensure(client, stored_stream(unique, 1, BYTES))
        yield StoredTable(client, unique)


async def test_expired_value_leaves_nothing(stored: StoredTable) -> None:
    await stored.table.put("response.a", b"1", ttl_s=1)
    await stored.table.put("response.b", b"1")
    await _until_messages(stored, 1)
    assert await stored.table.get("response.a") is None
    assert await stored.table.get("response.b") is not None


async def test_deleted_value_leaves_nothing(stored: StoredTable) -> None:
    """A marker for each deleted response would fill the server's memory."""
    await stored.table.put("response.a", b"secret")
    await stored.table.delete("response.a", marker_s=1)
    assert await stored.table.get("response.a") is None
    await _until_messages(stored, 0)


async def test_the_byte_bound_discards_the_oldest(stored: StoredTable) -> None:
    for number in range(40):
        await stored.table.put(f"response.{number}", bytes(64 * 1024))
        assert await stored.bytes() <= BYTES
    assert await stored.table.get("response.0") is None
    assert await stored.table.get("response.39") is not None


async def _until_messages(stored: StoredTable, count: int) -> None:
    async with asyncio.timeout(10):
        while await stored.messages() != count:
            await asyncio.sleep(0.05)
