"""A connection outlives every refusal: who uses it never holds one that is closed for good."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from headwater.events.jetstream import Connection, Credentials, connect, connection
from headwater.events.jetstream.connection import address_towards_any, nearest_first, own_address_towards
from headwater.ops.nats.config import new_seed
from tests.support.ports.waiting import eventually
from tests.support.servers.refusing import RefusingServer, refusing_server

REFUSALS = (
    "Authorization Violation",
    "Authentication Expired",
    "User Authentication Expired",
    "User Authentication Revoked",
    "Account Authentication Expired",
    "Authentication Timeout",
    "maximum connections exceeded",
    "maximum account active connections exceeded",
    "Secure Connection - TLS Required",
    "Server Shutdown",
    "Maximum Payload Violation",
    "Unknown Protocol Operation",
    "words of a later release",
)
"""What a server says before it closes a connection."""

CREDS = """-----BEGIN NATS USER JWT-----
e30.e30.e30
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{}
------END USER NKEY SEED------
"""


@pytest.fixture
async def server() -> AsyncIterator[RefusingServer]:
    async with refusing_server() as made:
        yield made


async def echoes(client: Connection, got: list[bytes]) -> None:
    """Wait until a message that the client publishes arrives at its own subscription."""
    before = len(got)

    async def arrives() -> None:
        while len(got) == before:
            await client.publish("s", b"x")
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await arrives()


async def outlives(words: str) -> None:
    """Refused with these words, it comes back once it is let in, and still has its subscriptions."""
    got: list[bytes] = []

    async def keep(message: Msg) -> None:
        got.append(message.data)

    async with refusing_server() as server:
        client = await connect(server.url, words)
        try:
            await client.subscribe("s", cb=keep)
            await echoes(client, got)
            server.refuse(words)
            await eventually(lambda: server.refused > 0, within_s=10)
            assert not client.is_closed
            server.accept()
            await echoes(client, got)
            assert "s" in server.subscriptions
        finally:
            await client.close()


async def test_an_open_connection_outlives_every_refusal() -> None:
    """It logs that it was refused, and goes on trying."""
    with capture_logs() as logs:
        ends = await asyncio.gather(*map(outlives, REFUSALS), return_exceptions=True)
    failed = {words: end for words, end in zip(REFUSALS, ends, strict=True) if end is not None}
    assert not failed
    told = {entry["connection"] for entry in logs if entry["event"] in ("nats_refused", "nats_error")}
    assert told == set(REFUSALS)


async def test_a_refusal_that_follows_each_login_is_not_met_by_a_busy_loop(server: RefusingServer) -> None:
    """Let in and thrown out at once, again and again: there is a pause before each further login."""
    client = await connect(server.url, "me")
    loop = asyncio.get_running_loop()
    logins: list[float] = []
    try:
        for number in range(1, 4):
            await eventually(lambda number=number: server.logins >= number)  # type: ignore[misc]
            logins.append(loop.time())
            server.cut(b"-ERR 'User Authentication Expired'\r\n")
        await eventually(lambda: server.logins >= 4)
        # `reconnect_time_wait` is a second: without it three logins take some milliseconds.
        assert loop.time() - logins[0] >= 1.0
        assert not client.is_closed
    finally:
        await client.close()


def nkey(path: Path) -> Credentials:
    """A seed of its own."""
    path.write_text(new_seed())
    return Credentials(nkey_file=str(path))


def creds(path: Path) -> Credentials:
    """A creds file, as `nsc` writes it."""
    path.write_text(CREDS.format(new_seed()))
    return Credentials(creds_file=str(path))


async def waits_for_a_whole_key(credentials: Credentials, content: str | None) -> None:
    """Its file has another content, or is gone, while the server closes the connection."""
    path = Path(credentials.nkey_file or credentials.creds_file)
    whole = path.read_text()
    async with refusing_server(nonce="bm9uY2U") as server:
        client = await connect(server.url, "me", credentials=credentials)
        try:
            with capture_logs() as logs:
                if content is None:
                    path.unlink()
                else:
                    path.write_text(content)
                server.cut()
                await eventually(lambda: any(str(path) in str(entry) for entry in logs), within_s=10)
                path.write_text(whole)
                await eventually(lambda: server.logins == 2 and client.is_connected, within_s=20)
        finally:
            await client.close()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "content",
    [
        "SU",
        None,
        *(pytest.param(text, marks=pytest.mark.soak) for text in ("", "-----BEGIN NATS USER JWT-----\n")),
    ],
)
@pytest.mark.parametrize("kind", [nkey, creds])
async def test_a_key_file_that_cannot_be_read_for_a_while_ends_nothing(
    tmp_path: Path, kind: Callable[[Path], Credentials], content: str | None
) -> None:
    """Renewed in place, it is empty, cut or missing for a moment: the connection names it and waits for a whole one."""
    await waits_for_a_whole_key(kind(tmp_path / "key"), content)


async def test_its_owner_closes_it(server: RefusingServer) -> None:
    """Only `close` ends it, also while it is refused."""
    client = await connect(server.url, "me")
    server.refuse("Authorization Violation")
    await eventually(lambda: server.refused > 0, within_s=5)
    async with asyncio.timeout(10):
        await client.close()
    assert client.is_closed
    refused = server.refused
    server.accept()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (server.logins, server.refused) == (1, refused)


async def test_a_refusal_at_the_first_login_is_named(server: RefusingServer) -> None:
    """A server that answers, and lets nobody in, is not one that does not answer."""
    server.refusal = "maximum connections exceeded"
    with pytest.raises(Exception, match="maximum connections exceeded"):
        await connect(server.url, "me", wait_s=1.5)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nNats-Msg-Id: a/1\r\nStatus: 404\r\n\r\n",
        b"NATS/1.0\r\nA:b\r\nA: c\r\nname with space: x\r\n\xff: y\r\nno colon\r\nz: \xc3\xa9\xff\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 409 Batch Completed\r\nNats-Pending-Messages: 3\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1016\r\n\r\n",
    ],
)
async def test_headers_are_those_of_the_client_library(raw: bytes | None) -> None:
    """Whether they are parsed at once or when they are asked for; none are no headers."""
    wanted = await Client()._process_headers(raw)
    got = await Connection("test", "i")._process_headers(raw)
    assert dict(got or {}) == (wanted or {})
    assert bool(got) is bool(wanted)
    for name, value in (wanted or {}).items():
        assert got[name] == got.get(name) == value


# Servers of this machine are connected to first.


HERE = ["nats://127.0.0.1:4222", "nats://localhost:4223", "nats://u:p@[::1]:4224"]
FAR = ["nats://203.0.113.7:4222", "nats://203.0.113.8", "nats://no.such.name.invalid:4222", "nats://:x"]


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and ways as on a host with a network, whatever this machine has."""

    def towards(host: str, _: int) -> str:
        if host.startswith("203."):
            return "192.0.2.1"
        if host.endswith("invalid"):
            raise socket.gaierror(-2, "unknown")
        return ""

    monkeypatch.setattr(connection, "own_address_towards", towards)


async def test_those_on_this_machine_come_first_and_none_is_left_out() -> None:
    """The others in any order; what cannot be looked up counts as far."""
    orders = set()
    for _ in range(40):
        found = await nearest_first([*FAR, *HERE])
        assert set(found[: len(HERE)]) == set(HERE)
        assert sorted(found) == sorted([*FAR, *HERE])
        orders.add(tuple(found))
    assert len(orders) > 1
    assert await nearest_first(FAR[:1]) == FAR[:1]


def test_the_own_address_matters_only_where_no_server_is_here() -> None:
    """One that cannot be looked up says nothing."""
    assert address_towards_any(FAR) == "192.0.2.1"
    assert address_towards_any([*FAR, HERE[0]]) == ""
    assert address_towards_any(FAR[2:]) == ""


def test_loopback_is_here() -> None:
    """Asked of the system itself."""
    assert own_address_towards("127.0.0.1", 1) == ""
