"""Where the bytes of a response go: an HTTP exchange, or what an API has in its place (a WebSocket)."""

from typing import Protocol

from headwater.actors.http.asgi import EventStream, Headers, respond


class ByteSink(Protocol):
    """One response. A stream is `start`, any number of `write`, and `settle`; a whole response is one `respond`."""

    @property
    def cut(self) -> bool:
        """Whether the client did not read for too long: what is written is discarded."""
        ...

    async def start(self, headers: Headers) -> None:
        """Begin the stream: headers, and what was written before."""
        ...

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send now, or as soon as the client reads. Does not block. `last` ends the stream."""
        ...

    async def settle(self) -> None:
        """Wait until everything was sent."""
        ...

    async def respond(self, body: bytes, headers: Headers) -> None:
        """Send a whole response."""
        ...


class HttpSink(EventStream):
    """Server-sent events, or one JSON document with status 200."""

    async def respond(self, body: bytes, headers: Headers) -> None:
        """See `ByteSink.respond`."""
        await respond(self._send, 200, body, headers)
