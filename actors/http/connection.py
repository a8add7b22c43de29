"""Connections of an edge's clients: HTTP/1.1 by uvicorn's parser protocol, with bounds on what a client may send and how slowly; and WebSockets.

header         its bytes and fields are limited, and it must be complete in time
body           must arrive at a minimum rate; its size is limited where it is read (`headwater.actors.http.body`)
refusals       have OpenAI's error format, even for input that is not HTTP, and close the connection
half-close     a client that closed its sending side gets its response; a full disconnect is detected by writing to it

WebSockets use uvicorn's protocol over wsproto; `WebSocket` is one connection as the application sees it.

ping           every `PING_S`; a client that does not answer in time is disconnected
messages       text only, of a limited size
slow clients   a bounded queue, then they are disconnected
drain          the application is notified, ends what runs, and closes
"""

import asyncio
from collections import Counter, deque
from typing import Any, Final, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from headwater.actors import metrics
from headwater.actors.http.asgi import BACKLOG_BYTES_MAX, Headers, Receive, Send
from headwater.actors.http.errors import ApiError
from headwater.actors.limits import ConnectionLimits

PING_S: Final = 20.0
PONG_S: Final = 20.0

UNSUPPORTED: Final = 1003


class WebSocketConnection(WSProtocol):
    """uvicorn's, counted among the connections of a server, and without an abrupt end when the server stops."""

    addresses: Counter[str]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting it."""
        address = self.client[0] if self.client else "local"
        self.addresses[address] -= 1
        if not self.addresses[address]:
            del self.addresses[address]
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Notify the application that the server stops; it closes the connection."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": "headwater.drain"})  # type: ignore[typeddict-item]  # an event of our own
        else:
            super().shutdown()


async def refuse(send: Send, error: ApiError) -> None:
    """Refuse a handshake with an HTTP error."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class WebSocket:
    """One accepted connection. `closed` is set when nothing can be sent any more."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._draining = asyncio.Event()
        self.closed = asyncio.Event()

    async def accept(self, headers: Headers) -> None:
        """Complete the handshake."""
        await self._receive()
        await self._send({"type": "websocket.accept", "headers": headers})

    async def receive(self) -> bytes | None:
        """The next text message, None once the connection is closed."""
        while True:
            message = await self._receive()
            match message["type"]:
                case "headwater.drain":
                    self._draining.set()
                case "websocket.receive" if message.get("text") is not None:
                    return str(message["text"]).encode()
                case "websocket.receive":
                    await self.close(UNSUPPORTED)
                case _:
                    self.closed.set()
                    return None

    async def wait_for_drain(self, most_s: float) -> bool:
        """Wait until the server stops; False if it has not after `most_s` seconds."""
        try:
            async with asyncio.timeout(most_s):
                await self._draining.wait()
        except TimeoutError:
            return False
        return True

    def send(self, message: bytes) -> None:
        """Send a text message now, or as soon as the client reads."""
        if self.closed.is_set():
            return
        if self._sender is None:
            step: Any = self._send({"type": "websocket.send", "text": message.decode()})
            try:
                step.send(None)
            except StopIteration:
                return
            except Exception:
                # The connection is gone, which `receive` reports.
                self.closed.set()
                return
            # The transport is full and nothing was written: continue in a task, in the same order.
            step.close()
            self._sender = asyncio.create_task(self._drain(), name="slow websocket client")
        self._queue.append(message)
        self._queued_bytes += len(message)
        if self._queued_bytes > BACKLOG_BYTES_MAX:
            self.closed.set()

    async def _drain(self) -> None:
        try:
            while self._queue and not self.closed.is_set():
                message = self._queue.popleft()
                self._queued_bytes -= len(message)
                await self._send({"type": "websocket.send", "text": message.decode()})
        except Exception:
            self.closed.set()
        finally:
            self._sender = None

    async def close(self, code: int) -> None:
        """Send what is queued, then close."""
        if self._sender is not None:
            await asyncio.wait({self._sender})
        if not self.closed.is_set():
            self.closed.set()
            await self._send({"type": "websocket.close", "code": code})


BODY_BYTES_PER_S_MIN: Final = 1024
"""A body that arrives more slowly, over a whole timeout, is rejected."""

LENGTH_DIGITS_MAX: Final = 18
LINGER_S: Final = 1.0
"""Seconds that a refused client has to read the response, while its input is discarded."""

LINGERING_MAX: Final = 32
"""Clients that are refused for want of connections and have this time at once: each still has a descriptor."""

LINGER_BYTES_MAX: Final = 1024 * 1024
PROBE_S: Final = 0.5
_STILL_HERE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"

_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def protocol_of(limits: ConnectionLimits) -> type["LimitedConnection"]:
    """The protocol class for one server, which counts its own connections."""
    return type("EdgeConnection", (LimitedConnection,), {"limits": limits, "addresses": Counter()})


def websocket_protocol_of(http: type["LimitedConnection"]) -> type[WebSocketConnection]:
    """The protocol class of its upgraded connections, which are counted with the others."""
    return type("EdgeWebSocket", (WebSocketConnection,), {"addresses": http.addresses})


def send_until_close(cycle: RequestResponseCycle) -> None:
    """Have a response whose length is unknown end with its connection: HTTP/1.0 has no chunks, and its clients would read their sizes as text."""
    send = cycle.send
    is_sized = True

    async def send_plain(message: Any) -> None:
        nonlocal is_sized
        if message["type"] == "http.response.start":
            is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not is_sized:
                cycle.keep_alive = cycle.chunked_encoding = False
        elif not is_sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]  # of this response only


class LimitedConnection(HttpToolsProtocol):
    """A connection with the limits that the module describes. `limits` and `addresses` (open connections by address) belong to one server."""

    limits: ConnectionLimits
    addresses: Counter[str]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._phase: Literal["idle", "header", "body"] = "idle"
        self._head_bytes = 0
        self._field_bytes = 0
        self._body_bytes = 0
        self._allowed_s: float | None = None
        """Seconds that the client has from the end of the bytes that are being parsed on, 0 for no bound; None: no other time began."""
        self._refused = False
        self._discarded = 0
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None
        self._running: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrowed, as by uvicorn
        """Count it, or refuse it."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else "local"
        self.addresses[self._address] += 1
        metrics.OPEN_CONNECTIONS.inc()
        limits = self.limits
        if self.addresses.total() > limits.connections:
            self._refuse(503, f"Too many connections: the limit is {limits.connections}.", "overloaded")
        elif limits.per_address and self.addresses[self._address] > limits.per_address:
            message = f"Too many connections from this address: the limit is {limits.per_address}."
            self._refuse(429, message, "rate_limit_exceeded")
        else:
            self._wait(limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting it."""
        self._stop_waiting()
        self.addresses[self._address] -= 1
        metrics.OPEN_CONNECTIONS.dec()
        if not self.addresses[self._address]:
            del self.addresses[self._address]
        if self._running is not None and not self._running.response_complete:
            # uvicorn notifies only the last request; earlier ones wait behind the one that runs.
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, within the limits."""
        if self._refused:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES_MAX:
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        if self._phase == "idle" and self._timer is None:
            # The first byte of a further request on this connection; a partial one gets no callback yet.
            self._allowed_s = self.limits.header_timeout_s
        try:
            self._parse(data)
        finally:
            # Once: a request that is here as a whole, as most are, needs no timer.
            allowed_s, self._allowed_s = self._allowed_s, None
            if allowed_s is not None and not self._refused:
                self._wait(allowed_s)

    def _parse(self, data: bytes) -> None:
        before = self._head_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # To any other protocol: the request is answered as plain HTTP.
            if self._should_upgrade() and not self._refused:
                self.handle_websocket_upgrade()
                return
        except httptools.HttpParserError as error:
            self._refuse(400, f"This is not a valid HTTP request: {error.__context__ or error}.")
            return
        if self._phase == "header" and self._head_bytes == before:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes:
                self._refuse_header()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._phase, self._head_bytes, self._field_bytes = "header", 0, 0
        self._allowed_s = self.limits.header_timeout_s

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field."""
        super().on_header(name, value)
        self._field_bytes += len(name) + len(value) + 4
        if len(self.headers) > self.limits.headers and not self._refused:
            self._refuse(431, f"The request has more than {self.limits.headers} header fields.")
        elif len(value) > LENGTH_DIGITS_MAX and name.lower() == b"content-length" and not self._refused:
            self._refuse(400, "content-length is not a length.")

    def on_headers_complete(self) -> None:
        """The header is complete: the application can start."""
        if self._refused:
            return
        if len(self.url) + self._field_bytes > self.limits.header_bytes:
            self._refuse_header()
            return
        self._phase, self._body_bytes = "body", 0
        self._allowed_s = self.limits.body_timeout_s
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            send_until_close(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of the body arrived."""
        if not self._refused:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if not self._refused:
            self._phase = "idle"
            self._allowed_s = 0.0
            super().on_message_complete()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # uvicorn declares None
        """The client closed its sending side: it can still read, if its request is complete."""
        cycle = self.cycle
        # TLS has no half-closed connections.
        tls = self.scheme == "https"
        if tls or self._refused or cycle is None or cycle.response_complete or cycle.more_body:
            return None
        # The last pipelined request; earlier ones keep the connection open for it.
        cycle.keep_alive = False
        if self.scope["http_version"] == "1.1":
            self._probe()
        return True

    def _probe(self) -> None:
        """Write to a client that half-closed, until its response begins: a disconnected one replies with a reset."""
        if (
            not self.transport.is_closing()
            and self._running is not None
            and not self._running.response_started
        ):
            self.transport.write(_STILL_HERE)
            self._timer = self.loop.call_later(PROBE_S, self._probe)

    def _wait(self, seconds: float) -> None:
        """Have the client that many seconds; 0: as long as it likes."""
        self._stop_waiting()
        if seconds:
            self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._phase == "header" and self._answering:
            # Pipelined after a request that is being answered; reading is paused until then.
            self._wait(self.limits.header_timeout_s)
        elif self._phase == "header":
            self._refuse(408, f"The header was not complete within {self.limits.header_timeout_s:g} s.")
        elif self._phase == "body":
            self._on_slow_body()
        else:
            self.transport.close()

    def _on_slow_body(self) -> None:
        limits = self.limits
        if self.flow.read_paused or self._body_bytes >= BODY_BYTES_PER_S_MIN * limits.body_timeout_s:
            self._body_bytes = 0
            self._wait(limits.body_timeout_s)
        elif self._answering and not self.cycle.response_started:
            self._refuse(408, f"The body arrived more slowly than {BODY_BYTES_PER_S_MIN} bytes per second.")
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_header(self) -> None:
        self._refuse(431, f"The header is larger than {self.limits.header_bytes} bytes.")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Respond with an error and close the connection. If another response is in progress, only close it."""
        if self._refused:
            return
        self._refused = True
        self._stop_waiting()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started or self._phase == "header":
                self.transport.close()
                return
        metrics.HTTP_ERRORS.labels(str(status)).inc()
        kind = {429: "rate_limit_error", 503: "server_error"}.get(status, "invalid_request_error")
        body = ApiError(status, message, kind=kind, code=code).body()
        retry = b"retry-after: 1\r\n" if status in (429, 503) else b""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n"
            % (status, _REASONS[status], len(body), retry)
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.addresses.total() > self.limits.connections + LINGERING_MAX:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)
