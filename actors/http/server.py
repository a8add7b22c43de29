"""HTTP servers: the `HttpServer` port, its implementation by uvicorn, and TLS certificates that can change.

Each TLS handshake uses the newest pair of certificate and key that could be loaded: `sni_callback`, which OpenSSL calls for every client, also for
one that names no server, puts it in place of the first one. A pair is loaded as a whole into a context of its own, so a
half-written one, or a key that belongs to another certificate, never replaces one that works. Open connections keep
theirs.
"""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
import uvicorn

from headwater.actors.http.asgi import Asgi
from headwater.actors.http.connection import PING_S, PONG_S, protocol_of, websocket_protocol_of
from headwater.actors.limits import ConnectionLimits
from headwater.schemas.names import host_port

POLL_S: Final = 2.0
"""Seconds between two looks at the files. Their links are followed: Kubernetes replaces a link, not the file."""

_log = structlog.get_logger("headwater.tls")


class BadCertificate(ValueError):
    """A certificate or key that cannot be used. The message names the file and what is wrong with it."""


class Certificate:
    """The certificate chain and the key of a server, in two PEM files.

    Raises `BadCertificate` if they cannot be used.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._seen = self._version()
        self._newest = _load(chain, key)
        self.context = _load(chain, key)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    async def watch(self) -> None:
        """Reload the files whenever they change. Runs until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.reload_changed)

    def reload_changed(self) -> bool:
        """Load the files if they changed since the last attempt; True if they replaced the pair in use."""
        seen = self._version()
        if seen == self._seen:
            return False
        # Remembered before it is loaded: each change is tried, and reported, once.
        self._seen = seen
        try:
            self._newest = _load(self._chain, self._key)
        except BadCertificate as error:
            _log.error("tls_certificate_not_reloaded", reason=str(error), in_use="the previous certificate")
            return False
        _log.info("tls_certificate_reloaded", path=str(self._chain))
        return True

    def _version(self) -> tuple[tuple[int, ...], ...]:
        """Changes when a file is written or replaced. A missing file has an empty version."""
        return tuple(_version_of(path) for path in (self._chain, self._key))


def _version_of(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _load(chain: Path, key: Path) -> ssl.SSLContext:
    """A server's context with this pair. Raises `BadCertificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for path in (chain, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise BadCertificate(f"{path}: {error.strerror}") from error
    try:
        context.load_cert_chain(chain, key, password=_no_password)
    except _Encrypted as error:
        raise BadCertificate(f"{key}: the key is encrypted; give one without a password") from error
    except ssl.SSLError as error:
        reason = "the key does not belong to the certificate" if "MISMATCH" in str(error) else _reason(error)
        raise BadCertificate(f"{chain} and {key}: {reason}") from error
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    # Otherwise OpenSSL would ask the terminal.
    raise _Encrypted


def _reason(error: ssl.SSLError) -> str:
    return f"not a PEM certificate and key ({error.reason or error})"


# The server.

KEEP_ALIVE_S = 75
"""Longer than the idle time of common load balancers (60 s), so that they never reuse a closed connection."""

BACKLOG = 4096
STOP_S = 3.0


class HttpServer(Protocol):
    """Passes requests to an application."""

    async def serve(self, app: Asgi) -> None:
        """Serve until `stop` is called. `listening` is set once requests are accepted."""
        ...

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        ...

    listening: asyncio.Event

    def stop(self) -> None:
        """Accept no more requests; `serve` returns once those in progress have ended."""
        ...

    def close(self) -> None:
        """Release all resources. Called once, also when `serve` never ran."""
        ...


class UvicornServer:
    """See `HttpServer`. The socket is bound by the caller, so a taken port is an early, clear error.

    It may be a copy made for one incarnation: the next one can listen on another copy, and connections wait for it.
    Only `stop` ends the listening of all copies.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        self._listener = listener
        self._certificate = certificate
        self._limits = limits or ConnectionLimits()
        self._server: _Uvicorn | None = None
        self.listening = asyncio.Event()
        host, port = listener.getsockname()[:2]
        self.url = f"{'https' if certificate else 'http'}://{host_port(host, port)}"

    async def serve(self, app: Asgi) -> None:
        """See `HttpServer.serve`."""
        http = protocol_of(self._limits)
        config = uvicorn.Config(
            app,
            http=http,
            ws=websocket_protocol_of(http),
            ws_max_size=self._limits.message_bytes,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PONG_S,
            # Compression costs more than a local network, and events are small.
            ws_per_message_deflate=False,
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        self._server = _Uvicorn(config, self.listening, self._certificate, self._limits.header_timeout_s)
        watch = asyncio.ensure_future(self._certificate.watch()) if self._certificate else None
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            if watch is not None:
                watch.cancel()

    def stop(self) -> None:
        """See `HttpServer.stop`."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        """See `HttpServer.close`."""
        if self._server is not None:
            self._server.abandon()
        self._listener.close()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, and reports when it listens."""

    def __init__(
        self,
        config: uvicorn.Config,
        listening: asyncio.Event,
        certificate: Certificate | None,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._tls: dict[str, Any] = {}
        if certificate is not None:
            # A connection is counted once its handshake is complete: asyncio's own limit is a minute.
            self._tls = {"ssl": certificate.context, "ssl_handshake_timeout": handshake_timeout_s}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on these sockets, then set `listening`."""
        config = self.config
        await self.lifespan.startup()

        def connection() -> asyncio.Protocol:
            protocol: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(connection, sock=listener, backlog=config.backlog, **self._tls)
            for listener in sockets or []
        ]
        self.started = True
        self._listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse connections, then stop. Closing this copy alone leaves them unanswered until the last copy is closed."""
        for listener in sockets or []:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        await super().shutdown(sockets)

    def abandon(self) -> None:
        """Accept no connections, and close each open one after its response. For a server that was cancelled."""
        for server in getattr(self, "servers", []):
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def capture_signals(self) -> Any:
        """Install nothing."""
        return contextlib.nullcontext()
