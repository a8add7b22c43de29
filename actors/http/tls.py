"""TLS of an edge: a certificate that is replaced while connections are served.

Each handshake uses the newest pair that could be loaded: `sni_callback`, which OpenSSL calls for every client, also for
one that names no server, puts it in place of the first one. A pair is loaded as a whole into a context of its own, so a
half-written one, or a key that belongs to another certificate, never replaces one that works. Open connections keep
theirs.
"""

import asyncio
import ssl
from pathlib import Path
from typing import Final

import structlog

POLL_S: Final = 2.0
"""Seconds between two looks at the files. Their links are followed: Kubernetes replaces a link, not the file."""

_log = structlog.get_logger("headwater.tls")


class BadCertificate(ValueError):
    """A certificate or key that cannot be used. The message names the file and what is wrong with it."""


class Certificate:
    """The certificate chain and the key of a server, in two PEM files.

    Raises `BadCertificate` if they cannot be used.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._seen = self._version()
        self._newest = _load(chain, key)
        self.context = _load(chain, key)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    async def watch(self) -> None:
        """Reload the files whenever they change. Runs until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self.reload_changed)

    def reload_changed(self) -> bool:
        """Load the files if they changed since the last attempt; True if they replaced the pair in use."""
        seen = self._version()
        if seen == self._seen:
            return False
        # Remembered before it is loaded: each change is tried, and reported, once.
        self._seen = seen
        try:
            self._newest = _load(self._chain, self._key)
        except BadCertificate as error:
            _log.error("tls_certificate_not_reloaded", reason=str(error), in_use="the previous certificate")
            return False
        _log.info("tls_certificate_reloaded", path=str(self._chain))
        return True

    def _version(self) -> tuple[tuple[int, ...], ...]:
        """Changes when a file is written or replaced. A missing file has an empty version."""
        return tuple(_version_of(path) for path in (self._chain, self._key))


def _version_of(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _load(chain: Path, key: Path) -> ssl.SSLContext:
    """A server's context with this pair. Raises `BadCertificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for path in (chain, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise BadCertificate(f"{path}: {error.strerror}") from error
    try:
        context.load_cert_chain(chain, key, password=_no_password)
    except _Encrypted as error:
        raise BadCertificate(f"{key}: the key is encrypted; give one without a password") from error
    except ssl.SSLError as error:
        reason = "the key does not belong to the certificate" if "MISMATCH" in str(error) else _reason(error)
        raise BadCertificate(f"{chain} and {key}: {reason}") from error
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    # Otherwise OpenSSL would ask the terminal.
    raise _Encrypted


def _reason(error: ssl.SSLError) -> str:
    return f"not a PEM certificate and key ({error.reason or error})"
