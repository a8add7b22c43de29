"""Three real nats-servers as one cluster on loopback, whose members are killed and started again at will."""

import asyncio
from pathlib import Path
from typing import Any, Self

from nats.aio.client import Client

from headwater.events.jetstream.api import api
from headwater.events.ports import LogError
from headwater.ops.start.sockets import free_port
from tests.support.servers.nats import NatsServer

SIZE = 3
READY_S = 60.0
POLL_S = 0.1
PROBE = "probe"


class NatsCluster:
    """Servers `n0` to `n2`, each with its store in a folder of its own; ports stay the same over restarts.

    Use as an asynchronous context manager: all are up inside, none outlives it.
    """

    def __init__(self, folder: Path) -> None:
        routes = [free_port(0) for _ in range(SIZE)]
        self.servers = [
            NatsServer(
                folder / f"n{number}",
                settings={
                    "server_name": f"n{number}",
                    "cluster": {
                        "name": "test",
                        "listen": f"127.0.0.1:{routes[number]}",
                        "routes": [f"nats://127.0.0.1:{port}" for port in routes],
                    },
                },
            )
            for number in range(SIZE)
        ]

    @property
    def url(self) -> str:
        """All servers, separated by commas."""
        return ",".join(server.url for server in self.servers)

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(server.start() for server in self.servers))
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop()

    async def until_ready(self, client: Client) -> None:
        """Return once the cluster has elected its own leader, and takes streams on all its members."""
        probe = {"name": PROBE, "subjects": [PROBE], "num_replicas": SIZE, "storage": "memory"}
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    await api(client, f"STREAM.CREATE.{PROBE}", probe, deadline_s=2.0)
                    break
                except LogError:
                    # No leader yet, or one that has not heard of all the others: they are "offline" to it.
                    await asyncio.sleep(POLL_S)
            await api(client, f"STREAM.DELETE.{PROBE}")

    async def leader(self, client: Client, stream: str) -> NatsServer:
        """The server that leads `stream`, waiting for an election under way."""
        async with asyncio.timeout(READY_S):
            while True:
                name = (await self._group(client, stream)).get("leader")
                if name:
                    return self.servers[int(name[1:])]
                await asyncio.sleep(POLL_S)

    async def until_current(self, client: Client, stream: str) -> None:
        """Return once `stream` has a leader and every follower holds what it holds."""
        async with asyncio.timeout(READY_S):
            while True:
                group = await self._group(client, stream)
                followers = group.get("replicas", [])
                if (
                    group.get("leader")
                    and len(followers) == SIZE - 1
                    and all(one["current"] for one in followers)
                ):
                    return
                await asyncio.sleep(POLL_S)

    async def _group(self, client: Client, stream: str) -> dict[str, Any]:
        try:
            info = await api(client, f"STREAM.INFO.{stream}", deadline_s=1.0)
        except LogError:
            return {}
        found: dict[str, Any] = info.get("cluster", {})
        return found
