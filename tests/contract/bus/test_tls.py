"""TLS to a real server, with certificates that openssl makes: plain, mutual, begun at once, and every way to fail."""

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from nats.aio.client import Client

from headwater.events.jetstream import Credentials, connect
from headwater.events.jetstream.streams import ensure_namespace
from headwater.events.ports import AccessDenied
from headwater.ops.nats import config as nats_config
from headwater.ops.nats.config import Wanted
from headwater.ops.start.sockets import free_port
from headwater.schemas import subjects
from tests.support.servers.nats import NatsServer

pytestmark = pytest.mark.skipif(
    not shutil.which("openssl"), reason="certificates of these tests are made by openssl, which is not here"
)

NS = "default"


class Authority(NamedTuple):
    """A certificate authority in a folder, and what it signed."""

    folder: Path

    @property
    def ca(self) -> str:
        """Its own certificate."""
        return str(self.folder / "ca.pem")

    def file(self, name: str) -> str:
        """Path of `<name>`."""
        return str(self.folder / name)


def openssl(folder: Path, *arguments: str) -> None:
    """Run it in `folder`."""
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def authority(folder: Path) -> Authority:
    """A new authority, with a server's and a client's certificate."""
    folder.mkdir()
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA",
            "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    (folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    (folder / "client.ext").write_text("subjectAltName=DNS:client\n")
    for name in ("server", "client"):
        openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-extfile", f"{name}.ext")  # fmt: skip
    return Authority(folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that the server's certificate is from."""
    return authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Somebody else's."""
    return authority(tmp_path_factory.mktemp("tls") / "theirs")


async def started(folder: Path, ours: Authority, *, verify: bool = False, tls: bool = True) -> NatsServer:
    """A server from `nats-config`, with users."""
    port = free_port(0)
    wanted = Wanted(NS, port=port, store=str(folder / "js"))
    if tls:
        wanted = wanted._replace(
            tls_cert=ours.file("server.pem"),
            tls_key=ours.file("server.key"),
            tls_ca=ours.ca,
            tls_verify=verify,
        )
    nats_config.write(wanted, folder)
    server = NatsServer(folder, port=port, config=folder / "nats.conf")
    await server.start()
    return server


@pytest.fixture
async def server(tmp_path: Path, ours: Authority) -> AsyncIterator[NatsServer]:
    """A server that shows a certificate."""
    made = await started(tmp_path, ours)
    yield made
    made.stop()


@pytest.fixture
async def strict(tmp_path: Path, ours: Authority) -> AsyncIterator[NatsServer]:
    """A server that wants to see one, too."""
    made = await started(tmp_path, ours, verify=True)
    yield made
    made.stop()


async def opened(server: NatsServer, url: str = "", **files: str) -> Client:
    """A connection with a key and these TLS files."""
    credentials = Credentials(nkey_file=str(server.folder / "operator.nk"), **files)  # type: ignore[arg-type]
    inbox = subjects.inbox(NS, "operator", "me", "bus")
    return await connect(url or server.url, "me", inbox=inbox, credentials=credentials)


async def test_everything_works_over_tls(server: NatsServer, ours: Authority) -> None:
    """With the authority named: under the address and under the name that the certificate is for."""
    for url in (server.url, f"tls://localhost:{server.port}"):
        client = await opened(server, url, tls_ca=ours.ca)
        await ensure_namespace(client, NS)
        await client.close()


async def test_a_server_of_another_authority_is_not_spoken_to(
    server: NatsServer, ours: Authority, theirs: Authority
) -> None:
    """Somebody in between, or the wrong file: at once, with the flag. So is one that no authority is named for."""
    for url, files in (
        (server.url, {"tls_ca": theirs.ca}),
        (server.url, {}),
        (server.url.replace("nats", "tls"), {}),
    ):
        with pytest.raises(AccessDenied, match="--nats-tls-ca") as caught:
            await opened(server, url, **files)
        assert "not trusted" in str(caught.value)


async def test_a_server_that_wants_a_certificate_gets_one(strict: NatsServer, ours: Authority) -> None:
    """Mutual TLS, and the refusal without."""
    files = {"tls_ca": ours.ca, "tls_cert": ours.file("client.pem"), "tls_key": ours.file("client.key")}
    client = await opened(strict, **files)
    await ensure_namespace(client, NS)
    await client.close()
    with pytest.raises(AccessDenied, match="--nats-tls-cert"):
        await opened(strict, tls_ca=ours.ca)


async def test_a_server_without_tls_is_not_spoken_to_in_the_clear(tmp_path: Path, ours: Authority) -> None:
    """Who asked for TLS must not be talked out of it."""
    server = await started(tmp_path, ours, tls=False)
    try:
        with pytest.raises(AccessDenied, match="does not offer TLS"):
            await opened(server, tls_ca=ours.ca)
    finally:
        server.stop()


async def test_tls_can_begin_before_anything_is_said(tmp_path: Path, ours: Authority) -> None:
    """The server's handshake_first: not even its greeting goes in the clear."""
    port = free_port(0)
    wanted = Wanted(
        NS,
        port=port,
        store=str(tmp_path / "js"),
        tls_cert=ours.file("server.pem"),
        tls_key=ours.file("server.key"),
    )
    nats_config.write(wanted, tmp_path)
    path = tmp_path / "nats.conf"
    # With "auto" the server greets in the clear those that begin no handshake within 50 ms, as a client on a busy machine may not.
    path.write_text(path.read_text().replace("tls: {", 'tls: {\n  "handshake_first": "1900ms",'))
    server = NatsServer(tmp_path, port=port, config=path)
    await server.start()
    try:
        key = str(tmp_path / "operator.nk")
        client = await connect(
            server.url,
            "me",
            inbox=subjects.inbox(NS, "operator", "me", "bus"),
            credentials=Credentials(nkey_file=key, tls_ca=ours.ca, tls_first=True),
        )
        await ensure_namespace(client, NS)
        await client.close()
    finally:
        server.stop()


async def test_a_key_that_does_not_go_with_its_certificate_is_told(ours: Authority) -> None:
    """Both flags, before anything is connected."""
    with pytest.raises(AccessDenied, match="--nats-tls-key"):
        Credentials(tls_cert=ours.file("client.pem"), tls_key=ours.file("server.key")).options("")
