"""The JetStream table when its server goes away: watchers must not believe in the dead."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from headwater.events.jetstream.api import api
from headwater.ops.start.sockets import free_port
from tests.support.ports.available import when_available
from tests.support.ports.logs import connected
from tests.support.ports.tables import TTL_S, TableCase, jetstream_table, watching
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer


@pytest.fixture
async def case(own_server: NatsServer) -> AsyncIterator[TableCase]:
    """An empty table on `own_server`."""
    async with jetstream_table(own_server, "loss") as made:
        yield made


async def test_entries_survive_a_kill_and_watchers_go_on(own_server: NatsServer, case: TableCase) -> None:
    """After SIGKILL and restart the table holds what it held, and a watcher hears the next change once."""
    revision = await case.table.create("k", b"1")
    assert revision is not None
    async with watching(case.other) as watcher:
        own_server.kill()
        await own_server.restart()
        entry = await when_available(partial(case.table.get, "k"))
        assert entry is not None
        assert entry.revision == revision
        assert await case.table.update("k", b"2", revision=revision) is not None
        await eventually(lambda: watcher.told("k") == [b"1", b"2"], within_s=60)


async def test_key_that_lapsed_while_the_server_was_away_is_told(
    own_server: NatsServer, case: TableCase
) -> None:
    """A watcher that comes back late hears of it all the same, although the delete marker is gone by then."""
    assert await case.table.create("dead", b"1", ttl_s=TTL_S) is not None
    await case.table.put("alive", b"1")
    async with watching(case.other) as watcher:
        await eventually(lambda: watcher.state() == {"dead": b"1", "alive": b"1"})
        own_server.kill()
        await _live_where_nobody_knows(own_server)
        await own_server.restart()
        assert await when_available(partial(case.table.get, "dead")) is None
        await eventually(lambda: watcher.state() == {"alive": b"1"}, within_s=40)


async def _live_where_nobody_knows(server: NatsServer) -> None:
    """Run the server on another port until the lapsed key has left no trace in its store."""
    port, server.port = server.port, free_port(0)
    await server.start()
    async with connected(server) as client:
        async with asyncio.timeout(20):
            while (await api(client, "STREAM.INFO.KV_loss"))["state"]["messages"] > 1:
                await asyncio.sleep(0.1)
    server.stop()
    server.port = port


async def test_key_that_lapsed_while_a_watcher_was_cut_off_is_told(
    own_server: NatsServer, case: TableCase
) -> None:
    """The same when the server only stood still for longer than a watcher waits."""
    assert await case.table.create("dead", b"1", ttl_s=3 * TTL_S) is not None
    async with watching(case.other) as watcher:
        await eventually(lambda: watcher.state() == {"dead": b"1"})
        own_server.pause()
        await case.passes(6 * TTL_S)
        own_server.resume()
        await eventually(lambda: watcher.state() == {}, within_s=40)
