"""The certificate of an edge, from its settings."""

from pathlib import Path

from headwater.actors.http.tls import BadCertificate, Certificate
from headwater.ops.config.edge import HttpSettings
from headwater.ops.config.errors import ConfigError


def certificate_of(http: HttpSettings) -> Certificate | None:
    """The certificate to serve with, None for plain HTTP. Raises `ConfigError`."""
    if not http.tls_cert and not http.tls_key:
        return None
    if not (http.tls_cert and http.tls_key):
        raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    try:
        return Certificate(Path(http.tls_cert), Path(http.tls_key))
    except BadCertificate as error:
        raise ConfigError(f"--tls-cert, --tls-key: {error}") from error
