"""TLS on real sockets: the certificate is replaced while the server runs, and a bad pair never replaces a good one."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from headwater.actors.http import server as http_server
from headwater.actors.http.server import BadCertificate, Certificate, UvicornServer
from headwater.actors.limits import ConnectionLimits

NAMES = ("first", "second")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two self-signed certificates with their keys, and one key with a password."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in NAMES:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", "first.key", "-out", "secret.key"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def install(pairs: Path, tmp_path: Path) -> Callable[[str, str], None]:
    """Put a certificate and a key where the server reads them, each in one step."""

    def put(certificate: str, key: str) -> None:
        for name, kind in ((certificate, "pem"), (key, "key")):
            new = tmp_path / f"new.{kind}"
            shutil.copy(pairs / f"{name}.{kind}", new)
            new.replace(tmp_path / f"tls.{kind}")

    put("first", "first")
    return put


@pytest.fixture
def certificate(install: Any, tmp_path: Path) -> Certificate:
    """That of the server, the first one."""
    return Certificate(tmp_path / "tls.pem", tmp_path / "tls.key")


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the scheme."""
    body = scope["scheme"].encode()
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(certificate: Certificate, limits: ConnectionLimits | None = None) -> AsyncIterator[int]:
    """A server with this certificate; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = UvicornServer(listener.dup(), limits, certificate)
        assert server.url.startswith("https://")
        task = asyncio.create_task(server.serve(application))
        await server.listening.wait()
        try:
            yield listener.getsockname()[1]
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()


class Client:
    """One connection that verifies nothing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, name: str | None = None) -> "Client":
        """Connect; `name` is the server name that it sends."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name or ""))

    @property
    def served(self) -> bytes:
        """The server's certificate, DER."""
        found: bytes = self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return found

    async def get(self) -> bytes:
        """One request."""
        self.writer.write(b"GET / HTTP/1.1\r\nhost: e\r\n\r\n")
        await self._reader.readuntil(b"\r\n\r\n")
        return await self._reader.readexactly(5)


def der(pairs: Path, name: str) -> bytes:
    """A certificate as clients see it."""
    return ssl.PEM_cert_to_DER_cert((pairs / f"{name}.pem").read_text())


@pytest.mark.parametrize("name", [None, "edge.example"])
async def test_new_connections_get_a_new_certificate(
    certificate: Certificate, install: Any, pairs: Path, name: str | None
) -> None:
    """Whether the client names the server or not; open connections go on."""
    async with serving(certificate) as port:
        old = await Client.connect(port, name)
        assert old.served == der(pairs, "first")
        assert await old.get() == b"https"
        install("second", "second")
        assert certificate.reload_changed()
        new = await Client.connect(port, name)
        assert new.served == der(pairs, "second")
        assert await new.get() == b"https"
        assert await old.get() == b"https"
        assert not certificate.reload_changed()
        for client in (old, new):
            client.writer.close()


async def test_the_server_looks_at_the_files_itself(
    certificate: Certificate, install: Any, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every few seconds."""
    monkeypatch.setattr(http_server, "POLL_S", 0.01)
    async with serving(certificate) as port:
        install("second", "second")
        async with asyncio.timeout(10):
            while (client := await Client.connect(port)).served != der(pairs, "second"):
                client.writer.close()
        client.writer.close()


@pytest.mark.parametrize(
    ("chain", "key", "why"),
    [
        ("second", "first", "does not belong to the certificate"),
        (None, "second", "No such file"),
        ("second", "secret", "encrypted"),
        ("garbage", "second", "not a PEM"),
    ],
)
async def test_a_bad_pair_keeps_the_old_one_and_says_why(
    certificate: Certificate, install: Any, pairs: Path, tmp_path: Path, chain: str | None, key: str, why: str
) -> None:
    """Reported once, and mended by the next good pair: files are not replaced both at once."""
    if chain == "garbage":
        (tmp_path / "tls.pem").write_text("not a certificate")
    elif chain is None:
        (tmp_path / "tls.pem").unlink()
    else:
        install(chain, key)
    with structlog.testing.capture_logs() as logs:
        assert not certificate.reload_changed()
        assert not certificate.reload_changed()
    (line,) = logs
    assert line["event"] == "tls_certificate_not_reloaded"
    assert why in line["reason"]
    async with serving(certificate) as port:
        client = await Client.connect(port)
        assert client.served == der(pairs, "first")
        client.writer.close()
        install("second", "second")
        assert certificate.reload_changed()
        client = await Client.connect(port)
        assert client.served == der(pairs, "second")
        client.writer.close()


def test_a_server_does_not_start_with_a_bad_pair(install: Any, tmp_path: Path) -> None:
    """The message names the files."""
    install("first", "second")
    with pytest.raises(BadCertificate, match=r"tls\.pem and .*tls\.key: the key does not belong"):
        Certificate(tmp_path / "tls.pem", tmp_path / "tls.key")


async def test_a_client_that_does_not_shake_hands_is_disconnected(certificate: Certificate) -> None:
    """It is not counted as a connection yet, so it may not stay for long."""
    async with serving(certificate, ConnectionLimits(header_timeout_s=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_old_versions_of_tls_are_refused(certificate: Certificate) -> None:
    """1.2 is the oldest."""
    assert certificate.context.minimum_version == ssl.TLSVersion.TLSv1_2
    async with serving(certificate) as port:
        client = await Client.connect(port)
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        client.writer.close()
