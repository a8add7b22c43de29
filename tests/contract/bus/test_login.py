"""Logging in to a real server: keys and passwords that fit or do not, rights that change, a cluster."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headwater.events.jetstream import Credentials, connect
from headwater.events.jetstream.api import api, publish
from headwater.events.jetstream.streams import ensure_namespace
from headwater.events.ports import AccessDenied, LogError, LogUnavailable
from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted, new_seed
from headwater.ops.start.sockets import free_port, free_range
from headwater.schemas import subjects
from tests.support.ports.guarded import NS, Guarded
from tests.support.servers.nats import NatsServer

SOON_S = 4.0
"""Waiting for a single deadline takes longer."""


async def refused_soon(call: Callable[[], Awaitable[object]]) -> str:
    """The message of the refusal, which must come soon."""
    began = time.monotonic()
    with pytest.raises(AccessDenied) as caught:
        await call()
    assert time.monotonic() - began < SOON_S
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_wrong_key_is_refused_at_once(guarded: Guarded, tmp_path: Path) -> None:
    """A key that the server does not know, and none at all: not a retry for ever."""
    seed = tmp_path / "stranger.nk"
    seed.write_text(new_seed())
    for credentials in (Credentials(nkey_file=str(seed)), None):
        message = await refused_soon(partial(connect, guarded.server.url, "me", credentials=credentials))
        assert guarded.server.url in message
        assert "--nats-nkey-file" in message
        assert "nats.conf" in message


async def test_the_key_of_another_kind_is_told_at_the_first_question(guarded: Guarded) -> None:
    """It may not read the inbox, so no answer would ever come."""
    key = Credentials(nkey_file=str(guarded.folder / "edge.nk"))
    inbox = subjects.inbox(NS, "router", "me", "bus")
    client = await connect(guarded.server.url, "me", inbox=inbox, credentials=key)
    for _ in range(2):
        message = await refused_soon(lambda: ensure_namespace(client, NS))
        assert f"{inbox}.>" in message
        assert "key of its own kind" in message
    await client.close()


async def test_a_password_never_shows(tmp_path: Path) -> None:
    """Not when it is wrong, and not when nobody answers."""
    port = free_port(0)
    wanted = Wanted(NS, auth="password", port=port, store=str(tmp_path / "js"))
    nats_config.write(wanted, tmp_path)
    server = NatsServer(tmp_path, port=port, config=tmp_path / "nats.conf")
    await server.start()
    try:
        password = (tmp_path / "edge.password").read_text().strip()
        client = await connect(
            f"nats://edge:{password}@127.0.0.1:{port}", "me", inbox=subjects.inbox(NS, "edge", "me", "bus")
        )
        await client.close()
        message = await refused_soon(lambda: connect(f"nats://edge:secret@127.0.0.1:{port}", "me"))
        assert "secret" not in message
    finally:
        server.stop()
    with pytest.raises(LogUnavailable) as caught:
        await connect(f"nats://edge:secret@127.0.0.1:{port}", "me", wait_s=0.3)
    assert "secret" not in str(caught.value)
    assert f"127.0.0.1:{port}" in str(caught.value)


async def test_rights_taken_away_later_are_told_and_end_no_process(guarded: Guarded) -> None:
    """The server reads its configuration anew: the connection comes back, and what is denied now is logged."""
    async with guarded.as_("edge") as edge:
        await publish(edge, subjects.request_subject(NS, "me"), b"1", {}, 2.0)
        path = guarded.folder / "nats.conf"
        path.write_text(path.read_text().replace(f"hw.{NS}.req.*", f"hw.{NS}.req.nobody"))
        guarded.server.reload()
        with capture_logs() as logs:
            async with asyncio.timeout(30):
                while True:
                    try:
                        await publish(edge, subjects.request_subject(NS, "me"), b"1", {}, 1.0)
                    except AccessDenied:
                        break
                    except LogUnavailable:
                        # It reconnects.
                        pass
        assert "nats_permission_denied" in [entry["event"] for entry in logs]


def free_cluster_ports(servers: int) -> int:
    """The first of as many consecutive ports for clients, whose ports for routes are free too."""
    while True:
        port = free_range(servers, "127.0.0.1")
        routes = [port + nats_config.CLUSTER_PORT_ABOVE + number for number in range(servers)]
        if [free_port(one) for one in routes] == routes:
            return port


async def test_three_servers_keep_each_stream_three_times(tmp_path: Path) -> None:
    """The cluster of `nats-config --servers 3`: routes stand, and the operator's streams have a leader and two more."""
    port = free_cluster_ports(3)
    names = nats_config.write(Wanted(NS, servers=3, port=port, store=str(tmp_path / "js")), tmp_path)
    servers = []
    for number, name in enumerate(name for name in names if name.endswith(".conf")):
        folder = tmp_path / f"server-{number}"
        folder.mkdir()
        servers.append(NatsServer(folder, port=port + number, config=tmp_path / name))
    try:
        for server in servers:
            await server.start()
        client = await connect(
            ",".join(server.url for server in servers),
            "me",
            inbox=subjects.inbox(NS, "operator", "me", "bus"),
            credentials=Credentials(nkey_file=str(tmp_path / "operator.nk")),
        )
        async with asyncio.timeout(40):
            while True:
                try:
                    await ensure_namespace(client, NS, replicas=3)
                    break
                except LogError:
                    # The cluster has no leader yet.
                    await asyncio.sleep(0.1)
            while True:
                cluster = (await api(client, f"STREAM.INFO.{subjects.request_stream(NS)}"))["cluster"]
                if cluster.get("leader") and all(one["current"] for one in cluster["replicas"]):
                    break
                await asyncio.sleep(0.1)
        assert len(cluster["replicas"]) == 2
        await client.close()
    finally:
        for server in servers:
            server.stop()
