"""Request bodies: read within bounds of one request and of all requests of an edge together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from headwater.actors.edge.errors import ApiError, overloaded
from headwater.actors.edge.http import ClientGone, Receive, Scope
from headwater.actors.edge.limits import BodyLimits

LENGTH_DIGITS_MAX: Final = 18

UNCOUNTED_BYTES: Final = 64 * 1024
"""Smaller bodies are not counted: what an edge has in flight of them is bounded by its connections."""


class Bodies:
    """Reads the bodies of one server and counts those in flight."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self.limits = limits or BodyLimits()
        self.in_flight_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The request's body, counted until the block ends.

        Raises `ApiError` 413 past the bound of one body, 503 past that of all, and `ClientGone`.
        """
        held = 0
        try:
            parts: list[bytes] = []
            size = 0
            self._check(max(0, length_of(scope)), 0)
            async for part in _parts(receive):
                size += len(part)
                if size > UNCOUNTED_BYTES:
                    self._check(size, held)
                    self.in_flight_bytes += size - held
                    held = size
                parts.append(part)
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self.in_flight_bytes -= held

    def _check(self, size: int, held: int) -> None:
        limits = self.limits
        if size > limits.bytes_max:
            raise ApiError(413, f"The body is larger than {limits.bytes_max} bytes.", code="body_too_large")
        if size > UNCOUNTED_BYTES and self.in_flight_bytes - held + size > limits.in_flight_bytes_max:
            raise overloaded(
                f"The bodies of this edge's requests have {limits.in_flight_bytes_max} bytes in flight.", 1.0
            )


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def length_of(scope: Scope) -> int:
    """What content-length says, -1 where it is missing. Raises `ApiError` 400 where it is no length."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LENGTH_DIGITS_MAX:
                raise ApiError(400, "content-length is not a length.", code="invalid_header")
            return int(value)
    return -1
