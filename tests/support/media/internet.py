"""A TLS and a plain server on loopback, and a table of names; the intake of the test sees them as the Internet."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PUBLIC = "93.184.216.34"

Behaviour = Callable[[socket.socket], None]


class Internet:
    """`behaviours` by path: what a server does with a connection once it has read a request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, list[list[str]]] = {}
        self.behaviours: dict[str, Behaviour] = {}
        self.requests: list[str] = []
        (folder / "asked").write_text("")

    @property
    def program(self) -> tuple[str, str]:
        """The intake's program that sees this Internet."""
        return str(Path(__file__).with_name("program.py")), str(self.folder)

    def name(self, host: str, *answers: list[str]) -> None:
        """Give a host addresses: the answers to each look-up of it."""
        self.names[host] = list(answers)
        (self.folder / "network.json").write_text(json.dumps(self.names))

    def serve(
        self, path: str, body: bytes, *headers: str, status: str = "200 OK", length: int | None = None
    ) -> None:
        """A response; its length is that of the body unless given, without any if negative."""
        size = len(body) if length is None else length
        lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {size}"] if size >= 0 else [])]
        head = "\r\n".join([*lines, "", ""]).encode()
        self.behaviours[path] = lambda to: to.sendall(head + body)

    def redirect(self, path: str, to: str) -> None:
        """A redirect."""
        self.serve(path, b"", f"Location: {to}", status="302 Found")

    def raw(self, path: str, data: bytes) -> None:
        """Bytes in place of a response."""
        self.behaviours[path] = lambda to: to.sendall(data)

    def asked(self, begin: str) -> list[str]:
        """What the intake asked the network: lines that begin so."""
        return [line for line in (self.folder / "asked").read_text().splitlines() if line.startswith(begin)]

    def handle(self, plain: socket.socket, context: ssl.SSLContext | None) -> None:
        """One connection: a request, and what its path does."""
        with suppress(OSError, ValueError), closing(plain):
            plain.settimeout(10)
            to = context.wrap_socket(plain, server_side=True) if context else plain
            with closing(to):
                head = b""
                while b"\r\n\r\n" not in head and (more := to.recv(65536)):
                    head += more
                path = head.split(b" ")[1].decode().partition("?")[0]
                self.requests.append(head.decode())
                self.behaviours.get(path, not_found)(to)


def not_found(to: socket.socket) -> None:
    """404."""
    to.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


@contextmanager
def internet(folder: Path, *hosts: str) -> Iterator[Internet]:
    """Servers for the time of the block. `hosts` have certificates and a public address."""
    made = Internet(folder)
    context = _context(folder, hosts)
    with _listening(made, None) as plain, _listening(made, context) as tls:
        (folder / "plain").write_text(str(plain))
        (folder / "tls").write_text(str(tls))
        for host in hosts:
            made.name(host, [PUBLIC])
        yield made


@contextmanager
def _listening(made: Internet, context: ssl.SSLContext | None) -> Iterator[int]:
    """A server, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    accepted, _ = listener.accept()
                    threading.Thread(target=made.handle, args=(accepted, context), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _context(folder: Path, hosts: tuple[str, ...]) -> ssl.SSLContext:
    """A server's TLS with a certificate for these hosts, by an authority in `ca.pem`."""
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Test CA")])
    root = _certificate(issuer, issuer, authority, authority, ca=True, hosts=())
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    leaf = _certificate(subject, issuer, key, authority, ca=False, hosts=hosts)
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(root.public_bytes(pem))
    plain = serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / "server.pem").write_bytes(private + leaf.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
    hosts: tuple[str, ...],
) -> x509.Certificate:
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if ca:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        built = built.add_extension(usage, critical=True)
        built = built.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(by.public_key()), critical=False
        )
    else:
        built = built.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False
        )
        built = built.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False
        )
    return built.sign(by, hashes.SHA256())
