"""HTTP servers: the `HttpServer` port, and its implementation by uvicorn."""

import asyncio
import contextlib
import socket
from typing import Any, Protocol

import uvicorn

from headwater.actors.http.asgi import Asgi
from headwater.actors.http.connection import protocol_of, websocket_protocol_of
from headwater.actors.http.limits import ConnectionLimits
from headwater.actors.http.tls import Certificate
from headwater.actors.http.websocket import PING_S, PONG_S
from headwater.schemas.addresses import host_port

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
        """Where clients connect."""
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
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

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
