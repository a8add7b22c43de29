"""Settings of the connection to NATS, and of its streams."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.events.table import STREAM_SIZES, StreamSizes
from headwater.ops.config.setting import Flag, Secret
from headwater.schemas.addresses import NATS_PORT


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
