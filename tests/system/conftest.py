"""What tests of commands against a server share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import connect
from tests.support.servers.nats import NatsServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server of the test's own, which it may stop."""
    server = NatsServer(tmp_path)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    """A connection to `server`."""
    connection = await connect(server.url, "test")
    yield connection
    await connection.close()


@pytest.fixture
def unique() -> str:
    """A namespace on a server of the test's own."""
    return "test"
