"""A real server with users and least permissions, and connections to it as each of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headwater.events.jetstream import Connection, Credentials, connect
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool
from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted
from headwater.ops.start.sockets import free_port
from headwater.schemas import subjects
from headwater.schemas.permissions import Kind
from tests.support.servers.nats import NatsServer

NS = "default"
POOL = "p"


class Guarded:
    """A server with users, and connections to it as each of them."""

    def __init__(self, folder: Path, server: NatsServer) -> None:
        self.folder = folder
        self.server = server

    @asynccontextmanager
    async def as_(self, kind: Kind, name: str = "me") -> AsyncIterator[Connection]:
        """A connection with the kind's key."""
        client = await connect(
            self.server.url,
            name,
            inbox=subjects.inbox(NS, kind, name, "bus"),
            credentials=Credentials(nkey_file=str(self.folder / f"{kind}.nk")),
        )
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def guarded_server(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A server from `nats-config`, with its streams made by the operator."""
    port = free_port(0)
    nats_config.write(Wanted(NS, port=port, store=str(tmp_path / "js")), tmp_path)
    server = NatsServer(tmp_path, port=port, config=tmp_path / "nats.conf")
    await server.start()
    made = Guarded(tmp_path, server)
    async with made.as_("operator") as operator:
        await ensure_namespace(operator, NS)
        await ensure_pool(operator, NS, POOL)
    yield made
    server.stop()
