"""HTTP over ASGI: whole responses, streams that are written to directly, and CORS.

A stream is written in the turn of the event loop in which its tokens arrive: ASGI's `send` is a coroutine that
finishes in one step as long as the client keeps up, so no task is woken per token. A client that does not keep up gets
a bounded queue and a task of its own; when the queue is full the client is disconnected.

CORS is applied around the application, so that every response has its headers: errors, streams and the answers to preflights, which come
without credentials and are answered before anything else looks at them.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Asgi = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
"""An ASGI application: it answers one request."""

BACKLOG_BYTES_MAX = 4 * 1024 * 1024
PING_S = 10.0
PING = b": ping\n\n"


def server_sent(kind: bytes, data: bytes) -> bytes:
    """A server-sent event of this type."""
    return b"event: " + kind + b"\ndata: " + data + b"\n\n"


STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client disconnected before its response was complete."""


async def respond(
    send: Send, status: int, body: bytes, headers: Headers, content_type: bytes = b"application/json"
) -> None:
    """A whole response."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


class HeaderAdder:
    """The `send` of an exchange that adds headers to its response, whatever that is."""

    __slots__ = ("_more", "_send")

    def __init__(self, send: Send, more: Callable[[], Headers]) -> None:
        self._send = send
        self._more = more

    def __call__(self, message: dict[str, Any]) -> Awaitable[None]:
        """Pass the message on. No coroutine of its own: `EventStream` runs that of the server to its end at once."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self._more()]
        return self._send(message)


_SEPARATORS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def without_separators(data: bytes) -> bytes:
    """JSON with U+2028, U+2029 and U+0085 escaped: clients that split lines as Python does would end an event at each."""
    for raw, escaped in _SEPARATORS:
        data = data.replace(raw, escaped)
    return data


class EventStream:
    """A server-sent event stream that may be written to from any callback of the loop."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._drainer: asyncio.Task[None] | None = None
        self._open = False
        self._ended = False
        self.cut = False

    async def start(self, headers: Headers) -> None:
        """Send status and headers, and what was written before."""
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]}
        )
        self._open = True
        early, self._queue, self._queued_bytes = self._queue, [], 0
        if early:
            self._write(b"".join(early), last=self._ended)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send `data` now or as soon as the client reads; `last` ends the response."""
        if self._ended or self.cut:
            return
        if not data.isascii():
            data = without_separators(data)
        self._ended = last
        if not self._open or self._drainer is not None:
            self._queue.append(data)
            self._queued_bytes += len(data)
            # Otherwise the edge would buffer the whole answer of a slow client.
            self.cut = self._queued_bytes > BACKLOG_BYTES_MAX
        else:
            self._write(data, last=last)

    def _write(self, data: bytes, *, last: bool) -> None:
        step: Any = self._send({"type": "http.response.body", "body": data, "more_body": not last})
        try:
            step.send(None)
        except StopIteration:
            return
        # The transport is full and nothing was written: continue in a task, in the same order.
        step.close()
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._drainer = asyncio.create_task(self._drain(), name="slow client")

    async def _drain(self) -> None:
        try:
            while self._queue and not self.cut:
                data, self._queue, self._queued_bytes = b"".join(self._queue), [], 0
                await self._send({"type": "http.response.body", "body": data, "more_body": not self._ended})
        finally:
            self._drainer = None

    async def settle(self) -> None:
        """Wait until a slow client has received everything."""
        if self._drainer is not None:
            await asyncio.gather(self._drainer, return_exceptions=True)


WRITE_S_MAX: Final = 20.0
"""A client that takes longer to read an event of a `WaitingStream` is disconnected."""


class WaitingStream:
    """A server-sent event stream whose writer waits until the client has taken each event. It begins with the first one."""

    def __init__(self, send: Send, headers: Headers | None = None) -> None:
        self._send = send
        self._headers = headers or []
        self.has_begun = False

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send an event; `last` ends the response. Raises `ClientGone`."""
        try:
            async with asyncio.timeout(WRITE_S_MAX):
                if not self.has_begun:
                    self.has_begun = True
                    headers = [*STREAM_HEADERS, *self._headers]
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        except TimeoutError as error:
            raise ClientGone from error


async def _first_of(first: asyncio.Future[Any], other: asyncio.Future[Any], timeout_s: float | None) -> None:
    """Wait until either is done, or the timeout. `asyncio.wait` for two costs twice the time, and requests wait twice."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: asyncio.Future[Any] | None = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(timeout_s, wake) if timeout_s is not None else None
    first.add_done_callback(wake)
    other.add_done_callback(wake)
    try:
        await woken
    finally:
        first.remove_done_callback(wake)
        other.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


async def _disconnected(receive: Receive) -> None:
    # No method: a cancelled task keeps its frames, and one with the object that holds the task is a cycle with all of the request.
    while (await receive())["type"] != "http.disconnect":
        pass


class Disconnect:
    """Detects that the client disconnected. One task per request, woken once."""

    def __init__(self, receive: Receive) -> None:
        self._task: asyncio.Task[None] = asyncio.create_task(_disconnected(receive), name="disconnect")

    async def or_done(self, done: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Wait for `done` or a disconnect; True if the client disconnected."""
        if not self._task.done() and not done.done():
            await _first_of(self._task, done, timeout_s)
        return self._task.done() and not done.done()

    @property
    def gone(self) -> bool:
        """True once the client has disconnected."""
        return self._task.done()

    def stop(self) -> None:
        """Stop watching."""
        self._task.cancel()


# CORS: the web pages that may read what an edge answers. None may, unless origins are listed.

ANY_ORIGIN: Final = "*"
MAX_AGE_S: Final = 600

METHODS: Final = b"GET, POST, DELETE, OPTIONS"
EXPOSED: Final = (
    b"retry-after, x-request-id, x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#]+", re.IGNORECASE)

REQUEST_HEADERS_MAX: Final = 1024

_READ: Final = (b"origin", b"access-control-request-method", b"access-control-request-headers")


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises `ValueError` for what is no origin: browsers would send something else, and never be let in."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin: give SCHEME://HOST[:PORT] without a path, or *")


def allow_origins(app: Asgi, origins: tuple[str, ...]) -> Asgi:
    """The application, readable by pages of these origins (`https://chat.example`, or `*` for all)."""
    return Cors(app, frozenset(origin.lower().encode() for origin in origins)) if origins else app


class Cors:
    """The application with CORS around it."""

    def __init__(self, app: Asgi, origins: frozenset[bytes]) -> None:
        self._app = app
        self._origins = origins
        self._any = ANY_ORIGIN.encode() in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or pass the request on and add the headers to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_headers = {name: value for name, value in scope["headers"] if name in _READ}
        headers = self._headers(request_headers.get(b"origin", b""))
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in request_headers:
            await send(
                {
                    "type": "http.response.start",
                    "status": 204,
                    "headers": headers + _preflight(request_headers),
                }
            )
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, HeaderAdder(send, lambda: headers))

    def _headers(self, origin: bytes) -> Headers:
        """Headers of a response to this origin. Caches must know that another origin gets others."""
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        vary: Headers = [(b"vary", b"origin")]
        if origin.lower() not in self._origins:
            return vary
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            *vary,
        ]


def _preflight(request_headers: dict[bytes, Any]) -> Headers:
    requested_names: bytes = request_headers.get(b"access-control-request-headers", b"")
    # Keys and clients' own headers have many names; which origins may send them is what is limited.
    headers = (
        requested_names if len(requested_names) <= REQUEST_HEADERS_MAX else b"authorization, content-type"
    )
    return [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", headers),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
    ]
