"""Settings of the endpoint picker."""

from typing import Annotated, Final, NamedTuple

from msgspec import Meta

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
