"""Request bodies, read within limits: of one body, and of all bodies in flight at a server."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Final

from headwater.actors.http.asgi import ClientGone, Receive, Scope
from headwater.actors.http.errors import ApiError, overloaded
from headwater.actors.http.limits import BodyLimits
from headwater.actors.http.unlocked import LARGE_BYTES, joined

LENGTH_DIGITS_MAX: Final = 18

UNCOUNTED_BYTES: Final = 64 * 1024
"""Smaller bodies are not counted: the limit on connections bounds them."""


class Bodies:
    """Reads the bodies of one server and counts those in flight."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self.limits = limits or BodyLimits()
        self.in_flight_bytes = 0

    def read(self, scope: Scope, receive: Receive) -> AbstractAsyncContextManager[bytes]:
        """The request's body, counted as in flight until the block ends.

        Raises `ApiError` 413 past the bound of one body, 503 past that of all, 415 for a compressed one, and `ClientGone`.
        """
        return _BodyInFlight(self, scope, receive)

    def check(self, size: int, held: int) -> None:
        """Raises `ApiError` for a body of this size, of which `held` bytes are counted already."""
        limits = self.limits
        if size > limits.bytes_max:
            raise ApiError(413, f"The body is larger than {limits.bytes_max} bytes.", code="body_too_large")
        if size > UNCOUNTED_BYTES and self.in_flight_bytes - held + size > limits.in_flight_bytes_max:
            raise overloaded(
                f"Request bodies in flight exceed {limits.in_flight_bytes_max} bytes; retry.", 1.0
            )


class _BodyInFlight:
    """See `Bodies.read`. An object and not a generator: the event loop keeps account of each of those, and every request has a body."""

    __slots__ = ("_bodies", "_held", "_receive", "_scope")

    def __init__(self, bodies: Bodies, scope: Scope, receive: Receive) -> None:
        self._bodies = bodies
        self._scope = scope
        self._receive = receive
        self._held = 0

    async def __aenter__(self) -> bytes:
        _check_encoding(self._scope)
        self._bodies.check(max(0, length_of(self._scope)), 0)
        try:
            return await _join(await self._parts())
        except BaseException:
            self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    async def _parts(self) -> list[bytes]:
        bodies, receive = self._bodies, self._receive
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > UNCOUNTED_BYTES:
                bodies.check(size, self._held)
                bodies.in_flight_bytes += size - self._held
                self._held = size
            parts.append(part)
            if not message.get("more_body"):
                return parts

    def _release(self) -> None:
        self._bodies.in_flight_bytes -= self._held
        self._held = 0


def _check_encoding(scope: Scope) -> None:
    """Raises `ApiError` 415 for a compressed body: a few bytes of one could be gigabytes."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise ApiError(
                415,
                f"content-encoding {value[:40].decode('latin-1')} is not supported: send the body uncompressed.",
                code="unsupported_content_encoding",
            )


async def _join(parts: list[bytes]) -> bytes:
    """One body of these parts, which are given up as they are copied: by a thread if they are large.

    Not while they arrive: bodies that grow side by side fragment the heap to twice their size.
    """
    if len(parts) == 1:
        return parts.pop()
    if sum(map(len, parts)) < LARGE_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(joined, parts)


def length_of(scope: Scope) -> int:
    """The value of content-length, -1 if it is missing. Raises `ApiError` 400 if it is invalid."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LENGTH_DIGITS_MAX:
                raise ApiError(400, "content-length is not a valid length.", code="invalid_header")
            return int(value)
    return -1
