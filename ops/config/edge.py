"""Settings of what an edge listens on and of its media, of the admin port and of the console."""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from headwater.actors.edge.settings import AccessSettings, check_jwks_url, jwks_path
from headwater.actors.http.limits import BodyLimits, ConnectionLimits
from headwater.actors.media.request import (
    FetchPolicy,
    IntakeSettings,
    MediaLimits,
)
from headwater.ops.config.setting import ConfigError, Flag, Prefix
from headwater.schemas.addresses import is_loopback
from headwater.schemas.messages.media import MediaTransport

CONNECTION_NAMES = {
    "message_bytes": "message-bytes-max",
    "connections": "connections-max",
    "per_address": "connections-per-address-max",
}
BODY_NAMES = {"bytes_max": "body-bytes-max"}


class HttpLimits(NamedTuple):
    """The limits of connections and of bodies."""

    connections: Annotated[ConnectionLimits, Prefix("", CONNECTION_NAMES, inline=True)] = ConnectionLimits()
    bodies: Annotated[BodyLimits, Prefix("", BODY_NAMES, inline=True)] = BodyLimits()


class HttpSettings(NamedTuple):
    """The address an edge listens on, and what it accepts from clients."""

    host: Annotated[str, Meta(description="address that the edge listens on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port that the edge listens on; 0: a free one")] = (
        8000
    )
    share_port: Annotated[
        bool,
        Meta(
            description="other edges of this machine may listen on the same port, if they are started with this, too: the kernel spreads "
            "connections over them"
        ),
    ] = False
    limits: Annotated[
        HttpLimits,
        Flag("http-limits"),
        Meta(description="limits of connections, headers and bodies that differ from their defaults"),
    ] = HttpLimits()
    tls_cert: Annotated[
        str, Meta(description="certificate chain of the edge, PEM; read again when the file changes")
    ] = ""
    tls_key: Annotated[str, Meta(description="private key of the certificate, PEM; read with it")] = ""
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="origins of web pages that may use the edge, comma-separated (https://chat.example), or `*`; "
            "empty: none"
        ),
    ] = ()
    probes: Annotated[
        bool,
        Meta(
            description="serve /metrics, /health and /live on the edge's own port too, not only on --metrics-port"
        ),
    ] = True


CONSOLE_PORT: Final = 8001


def check_access(access: AccessSettings, host: str) -> None:
    """Raises `ConfigError` for an edge that every client on the network could use, and for incomplete settings of OIDC."""
    if access.mode == "none" and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: without authentication an edge listens on a loopback address only. Give --auth keys, and "
            "create a key with `headwater keys create --tenant NAME`"
        )
    oidc = access.oidc
    if "oidc" not in access.mode.split(","):
        return
    for flag, value in (
        ("--oidc-issuer", oidc.issuer),
        ("--oidc-audience", oidc.audience),
        ("--oidc-jwks-url", oidc.jwks_url),
    ):
        if not value:
            raise ConfigError(f"--auth {access.mode}: {flag} is missing")
    if not jwks_path(oidc.jwks_url):
        try:
            check_jwks_url(oidc.jwks_url)
        except ValueError as error:
            raise ConfigError(f"--oidc-jwks-url {oidc.jwks_url}: {error}") from error


class AdminSettings(NamedTuple):
    """The admin port: control of workers over HTTP."""

    host: Annotated[str, Meta(description="address that the admin port listens on")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="port for control of workers over HTTP; 0: none")
    ] = 0
    token_file: Annotated[str, Meta(description="admin tokens, one per line: TOKEN or NAME TOKEN")] = ""


class ConsoleSettings(NamedTuple):
    """The console: a page that shows the fleet at any position of its log."""

    host: Annotated[str, Meta(description="address that the console listens on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port of the console. With `up` another free one if it is taken, and 0: no console; else 0: a free one",
        ),
    ] = CONSOLE_PORT
    token_file: Annotated[
        str,
        Meta(
            description="tokens of operators, one per line: TOKEN or NAME TOKEN; needed to control workers, and beside --auth the only "
            "way to listen on other addresses than loopback"
        ),
    ] = ""


def check_console(console: ConsoleSettings, access: AccessSettings) -> None:
    """Raises `ConfigError` for a console that everyone on the network could read."""
    if not is_loopback(console.host) and not console.token_file and access.mode == "none":
        raise ConfigError(
            f"--console-host {console.host}: without authentication a console listens on a loopback address only. Give "
            "--console-token-file, or --auth keys"
        )


# Settings of images, audio and video in requests.


class MediaSettings(NamedTuple):
    """The sources of media, the processes that decode them, and the limits of single items."""

    fetch: Annotated[FetchPolicy, Prefix("media", inline=True)] = FetchPolicy()
    intake: Annotated[
        IntakeSettings,
        Meta(description="the processes that fetch and decode media, where they differ from the defaults"),
    ] = IntakeSettings()
    limits: Annotated[
        MediaLimits,
        Meta(
            description="limits of one image, recording, video, embedding or file that differ from their defaults",
            examples=["image_bytes_max=16777216,video_frames_max=16"],
        ),
    ] = MediaLimits()


class MediaTransferSettings(NamedTuple):
    """How decoded media get from an edge to the workers of its requests: the same for both."""

    transport: Annotated[
        MediaTransport,
        Meta(
            description="how workers read decoded media of more than 1 MiB from edges: in pieces through NATS (none), over NIXL, or in shared memory "
            "(both on one machine). Where a reading fails, in pieces"
        ),
    ] = "none"
    mib: Annotated[
        int,
        Meta(
            ge=16,
            description="MiB of memory of an edge, and of a worker, for media on their way; larger items come in pieces",
        ),
    ] = 256
