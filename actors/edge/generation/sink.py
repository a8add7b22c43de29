"""Where the bytes of a response go: an HTTP exchange, or what an API has in its place (a WebSocket), and the headers that show its routing."""

from typing import Protocol

from headwater.actors.edge.request.saga_types import Saga
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


def routing_headers(name: str, saga: Saga, *, hides_cached: bool = False) -> Headers:
    """The headers of the request `name`, whose first choice is `saga`.

    `hides_cached`: they do not say how much of the prompt is cached.
    """
    headers: Headers = [(b"x-request-id", name.encode())]
    decision = saga.decision
    if decision is not None:
        headers += [
            (b"x-headwater-worker", decision.worker.encode()),
            (b"x-headwater-log-position", b"%d" % decision.position),
        ]
        if not hides_cached:
            headers.append((b"x-headwater-cached-blocks", b"%d" % decision.chosen.cached_blocks))
        if decision.waited_ms:
            headers.append((b"x-headwater-waited-ms", b"%d" % decision.waited_ms))
        if decision.leg:
            # A stream's headers are sent when the prompt is placed, before its decode worker is chosen.
            headers.append((b"x-headwater-leg", decision.leg.encode()))
    if saga.prefilled_by:
        headers.append((b"x-headwater-prefill-worker", saga.prefilled_by.encode()))
    return headers
