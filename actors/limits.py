"""Limits that actors share: on clients of their HTTP servers, and on the time that an actor takes to stop. The only place of these defaults.

Light to import: the command line reads them.
"""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta


class ConnectionLimits(NamedTuple):
    """Limits of connections and of the headers on them."""

    header_bytes: int = 64 * 1024
    """Maximum size of a request's header, in bytes; beyond it 431."""
    headers: int = 128
    """Maximum header fields of a request; beyond it 431."""
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds in which a header must be complete; beyond it 408")
    ] = 10.0
    body_timeout_s: Annotated[
        float,
        Meta(gt=0, description="seconds after which a body that hardly progresses is rejected with 408"),
    ] = 30.0
    message_bytes: Annotated[
        int, Meta(ge=1024, description="maximum size of a WebSocket message, in bytes; beyond it 1009")
    ] = 16 * 1024 * 1024
    connections: Annotated[int, Meta(ge=1, description="maximum connections of an edge; beyond it 503")] = (
        8_192
    )
    per_address: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum connections of one address; beyond it 429; 0: only the total is limited",
        ),
    ] = 0


class BodyLimits(NamedTuple):
    """Limits of request bodies."""

    bytes_max: Annotated[int, Meta(ge=1024, description="maximum size of a request body, in bytes")] = (
        64 * 1024 * 1024
    )
    in_flight_bytes_max: int = 256 * 1024 * 1024
    """Maximum bytes of all larger bodies in unanswered requests of an edge; beyond it 503."""


DRAIN_TIMEOUT_S: Final = 15.0
"""Seconds that in-flight requests have to finish when an actor stops; then they migrate or fail."""
