"""Sections of settings: NATS and its streams, traces, routers, the picker, the admin port, the console, what edges listen on, and media."""

import os
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headwater.actors.edge.settings import AccessSettings, check_jwks_url, jwks_path
from headwater.actors.limits import BodyLimits, ConnectionLimits
from headwater.actors.media.request import (
    FetchPolicy,
    IntakeSettings,
    MediaLimits,
)
from headwater.engines.traits import EngineTraces, Text
from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.ops.config.setting import ConfigError, Flag, Prefix, Secret
from headwater.schemas.media import MediaTransport
from headwater.schemas.names import NATS_PORT, is_loopback
from headwater.schemas.routing import DEFAULT_POLICY, PolicyName, Weights

# NATS.


def without_secrets(urls: str) -> str:
    """URLs of servers without their users, passwords and tokens."""
    if "@" not in urls:
        return urls
    from headwater.events.jetstream import without_secret

    return ",".join(without_secret(url) for url in urls.split(","))


class NatsSettings(NamedTuple):
    """How a process reaches NATS, and who it is there."""

    url: Annotated[
        str,
        Flag("nats"),
        Secret(without_secrets),
        Meta(
            description="URL of the NATS server, or several separated by commas. Default: the server on this machine at "
            "--nats-port, which `up` starts"
        ),
    ] = ""
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port of the NATS server that `up` starts on this machine; another free one if it is taken",
        ),
    ] = NATS_PORT
    namespace: Annotated[
        str, Flag("namespace"), Meta(description="name of the deployment: the first token of every subject")
    ] = "default"
    keys_dir: Annotated[
        str,
        Meta(
            description="folder written by `nats-config`: each process logs in with the nkey of its kind from it"
        ),
    ] = ""
    nkey_file: Annotated[str, Meta(description="file with the nkey seed to log in with")] = ""
    creds_file: Annotated[
        str, Meta(description="file with the JWT and nkey seed to log in with (.creds)")
    ] = ""
    tls_ca: Annotated[
        str, Meta(description="CA certificates that the NATS server's certificate is verified with, PEM")
    ] = ""
    tls_cert: Annotated[str, Meta(description="client certificate for the NATS server, PEM")] = ""
    tls_key: Annotated[str, Meta(description="private key of the client certificate, PEM")] = ""
    tls_first: Annotated[bool, Meta(description="TLS-first handshake (server option `handshake_first`)")] = (
        False
    )

    capture: str = ""
    """Commands that read a pool read this capture in place of the server; empty: none."""

    @property
    def address(self) -> str:
        """URL of the server."""
        return self.url or f"nats://127.0.0.1:{self.port}"


class StreamSettings(NamedTuple):
    """The streams that a process creates where they are missing."""

    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=5,
            description="replicas of each stream: 1, or 3 on a cluster; streams that have more keep them",
        ),
    ] = 1
    sizes: Annotated[
        StreamSizes,
        Flag("stream-sizes"),
        Meta(
            description="maximum bytes of streams that differ from their defaults; the NATS server reserves them"
        ),
    ] = STREAM_SIZES


# Traces.

GRPC_PORT = 4317
"""The port that OTLP over gRPC has by its specification; that of HTTP is 4318."""

PATH = "/v1/traces"
PORTS = {"http": 80, "https": 443}
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TraceSettings(NamedTuple):
    """Traces of requests."""

    otlp: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry receiver that gets traces of requests, such as http://127.0.0.1:4318; engines send their own "
            "spans there too (default: none). gRPC for port 4317 and HTTP for others, unless OTEL_EXPORTER_OTLP_PROTOCOL says otherwise. Headers, certificates and time limits are in OTEL_EXPORTER_OTLP_…, as for any other sender"
        ),
    ] = ""
    sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of all traces that is sent, by their ids; of a client's own trace, whatever the client decided. Errors, migrations and "
            "slow requests always are",
        ),
    ] = 0.01
    slow_s: Annotated[
        float,
        Meta(
            ge=0,
            description="requests are slow that need so many seconds until their first token, or until their end if they have none; 0: none is",
        ),
    ] = 10.0


def engine_traces(settings: TraceSettings) -> EngineTraces:
    """What engines are told of the receiver. Raises `ConfigError`."""
    if not settings.otlp:
        return EngineTraces(sample=settings.sample)
    receiver = receiver_of(settings.otlp)
    return EngineTraces(receiver.endpoint, receiver.environment, settings.sample)


class Receiver(NamedTuple):
    """A receiver's endpoint of traces, and the host and port that it is reached at."""

    endpoint: str
    protocol: Literal["http", "grpc"]
    address: tuple[str, int]

    @property
    def environment(self) -> str:
        """The protocol as OpenTelemetry's variables name it."""
        return "grpc" if self.protocol == "grpc" else "http/protobuf"


def receiver_of(url: str) -> Receiver:
    """The endpoint that a URL means: over HTTP without a path the one of the specification. Raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--otlp {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"--otlp {url}: give a URL such as http://127.0.0.1:4318 (HTTP) or http://127.0.0.1:4317 (gRPC)"
        )
    protocol_name = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    is_grpc = protocol_name == "grpc" if protocol_name else port == GRPC_PORT
    protocol: Literal["http", "grpc"] = "grpc" if is_grpc else "http"
    if protocol == "http" and parts.path in ("", "/"):
        url = url.rstrip("/") + PATH
    return Receiver(url, protocol, (host, port or PORTS[parts.scheme]))


# Routers.

WEIGHT_MAX: Final = 1e9
"""Above it costs stop being numbers that differ."""


OWN_FLAGS: Final = {"local_tokens": "--local-prefill-tokens", "apart": "--disaggregate"}
"""What a router is told of by flags of their own."""


def read_weights(text: str) -> dict[str, Any]:
    """Weights by name from NAME=VALUE,…; the message of a `ValueError` names the part that cannot be used."""
    fields = [field.name for field in msgspec.structs.fields(Weights)]
    values: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", ",").split(",")):
        name, equals, value = part.partition("=")
        if not equals or name not in fields:
            raise ValueError(f"{part}: give NAME=VALUE; names are {', '.join(fields)}")
        try:
            values[name] = _weight(name, value)
        except ValueError as error:
            raise ValueError(f"{part}: {error}") from error
    return values


def _weight(name: str, value: Any) -> Any:
    """One weight. Not as annotations of `Weights`: decisions in a log have them, and must be readable whatever the range is now.

    Raises `ValueError`.
    """
    kind = type(getattr(Weights(), name))
    converted = msgspec.convert(value, kind, strict=False)
    if kind is not bool and not 0 <= converted <= WEIGHT_MAX:
        raise ValueError(f"expected a number from 0 to {WEIGHT_MAX:g}")
    return converted


def write_weights(values: dict[str, Any]) -> str:
    """The opposite of `read_weights`."""
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()
    )


WeightValues = Annotated[dict[str, Any], Text(read_weights, write_weights, "NAME=VALUE,…")]


class RouterSettings(NamedTuple):
    """How a router chooses a worker."""

    policy: Annotated[PolicyName, Meta(description="routing policy")] = DEFAULT_POLICY
    temperature: Annotated[
        float,
        Meta(
            ge=0,
            description="policy kv: 0 takes the lowest cost; at T a worker that costs (1 + T) times as much is e times "
            "less likely",
        ),
    ] = 0.0
    weights: Annotated[
        WeightValues,
        Meta(
            description="cost weights that differ from their defaults; `headwater tune` searches for better ones",
            examples=["crowding=0.1,arrivals=10"],
        ),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    local_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="prompts with at most this many uncached tokens are prefilled by the decode worker",
        ),
    ] = Weights().local_tokens
    disaggregate: Annotated[
        Literal["estimate", "always"],
        Meta(
            description="longer prompts go to a prefill worker if that is estimated to be cheaper, or always"
        ),
    ] = "estimate"


def weights_of(settings: RouterSettings) -> Weights:
    """The weights of a router."""
    for name, flag in OWN_FLAGS.items():
        if name in settings.weights:
            raise ConfigError(f"--routing-weights {write_weights(settings.weights)}: {name} is {flag}")
    base = Weights(local_tokens=settings.local_prefill_tokens, apart=settings.disaggregate == "always")
    return replaced(base, settings.weights)


def replaced(base: Weights, values: dict[str, Any]) -> Weights:
    """`base` with these values. Raises `ConfigError` for a name or value that a file has wrong."""
    try:
        merged = msgspec.structs.asdict(base) | values
        return msgspec.structs.replace(
            base,
            **{name: _weight(name, value) for name, value in merged.items()},
        )
    except (AttributeError, ValueError) as error:
        names = ", ".join(field.name for field in msgspec.structs.fields(Weights))
        raise ConfigError(f"--routing-weights {write_weights(values)}: {error}; names are {names}") from error


# The endpoint picker.

PICKER_PORT: Final = 9002
"""The port on which gateways expect a picker unless they are told another."""


class PickerSettings(NamedTuple):
    """Where gateways reach a picker."""

    host: Annotated[str, Meta(description="address that the picker listens on")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port for gateways, which has gRPC's health too. With `up` 0: no picker; else 0: a free one",
        ),
    ] = 0
    health_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="further port with gRPC's health alone, always without TLS, as probes need it; 0: none",
        ),
    ] = 0
    tls_cert: Annotated[
        str, Meta(description="certificate chain of the picker, PEM; most gateways require TLS of it")
    ] = ""
    tls_key: Annotated[str, Meta(description="private key of the certificate, PEM")] = ""


# What edges, the admin port and the console listen on.

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
    try:
        if not jwks_path(oidc.jwks_url):
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
