"""Settings of edges and of the admin port."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.actors.edge.request.settings import ClientLimits
from headwater.actors.http.limits import BodyLimits, ConnectionLimits
from headwater.ops.config.setting import Flag, Prefix
from headwater.schemas.events.request import PayloadKind

CONNECTION_NAMES = {
    "header_bytes": "header-bytes-max",
    "headers": "headers-max",
    "connections": "connections-max",
    "per_address": "connections-per-address-max",
}
BODY_NAMES = {"bytes_max": "body-bytes-max", "in_flight_bytes_max": "bodies-bytes-max"}


class HttpSettings(NamedTuple):
    """Where an edge listens, and what it accepts from clients."""

    host: Annotated[str, Meta(description="address that the edge listens on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port that the edge listens on; 0: a free one")] = (
        8000
    )
    connections: Annotated[ConnectionLimits, Prefix("", CONNECTION_NAMES, inline=True)] = ConnectionLimits()
    bodies: Annotated[BodyLimits, Prefix("", BODY_NAMES, inline=True)] = BodyLimits()


class EdgeSettings(NamedTuple):
    """What clients may ask for, and what of their requests is recorded."""

    record_payloads: Annotated[
        PayloadKind,
        Flag("record-payloads"),
        Meta(
            description="what of prompts and outputs the request log contains: off, hashed (SHA-256) or full"
        ),
    ] = "off"
    allow_special_tokens_in_text: Annotated[
        bool,
        Flag("allow-special-tokens-in-text"),
        Meta(description="control tokens spelled in clients' messages act as control tokens, not as text"),
    ] = False
    client: Annotated[ClientLimits, Prefix("client")] = ClientLimits()


class AdminSettings(NamedTuple):
    """The admin port: control of workers over HTTP."""

    host: Annotated[str, Meta(description="address that the admin port listens on")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="port for control of workers over HTTP; 0: none")
    ] = 0
    token_file: Annotated[str, Meta(description="admin tokens, one per line: TOKEN or NAME TOKEN")] = ""
