"""How a connection authenticates to the server and verifies it: keys and certificates, checked before use.

Files are named by setting and read again at each reconnect, so a renewed creds file needs no restart.
"""

import ssl
from pathlib import Path
from typing import Any

import msgspec
import nkeys

from headwater.events.errors import AccessDenied

_CREDS_MARKS = ("BEGIN NATS USER JWT", "BEGIN USER NKEY SEED")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Paths, empty where not used. A user with password, or a token, is given in the URL instead."""

    nkey_file: str = ""
    creds_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_first: bool = False

    def check(self) -> None:
        """Can the files still be used? Raises `AccessDenied` naming the invalid setting."""
        self.options("")

    def options(self, url: str) -> dict[str, Any]:
        """Arguments for `Client.connect`. Raises `AccessDenied` naming the invalid setting."""
        made: dict[str, Any] = {}
        if self.nkey_file and self.creds_file:
            raise AccessDenied("--nats-nkey-file and --nats-creds-file are two identities: set one")
        if self.nkey_file:
            _check_seed(self.nkey_file)
            made["nkeys_seed"] = self.nkey_file
        if self.creds_file:
            _check_creds(self.creds_file)
            made["user_credentials"] = self.creds_file
        context = self._context(url)
        if context is not None:
            made |= {"tls": context, "tls_handshake_first": self.tls_first}
        return made

    def _context(self, url: str) -> ssl.SSLContext | None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise AccessDenied("--nats-tls-cert and --nats-tls-key belong together: set both")
        if not (self.tls_ca or self.tls_cert or self.tls_first or url.startswith(("tls://", "wss://"))):
            return None
        for flag, path in (
            ("--nats-tls-ca", self.tls_ca),
            ("--nats-tls-cert", self.tls_cert),
            ("--nats-tls-key", self.tls_key),
        ):
            if path:
                _text(flag, path)
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
        except ssl.SSLError as error:
            raise AccessDenied(
                f"--nats-tls-ca {self.tls_ca}: contains no certificate in PEM format ({error.reason})"
            ) from error
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except ssl.SSLError as error:
                raise AccessDenied(
                    f"--nats-tls-cert {self.tls_cert}: is not a certificate in PEM format that matches "
                    f"--nats-tls-key {self.tls_key} ({error.reason})"
                ) from error
        return context


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise AccessDenied(
            f"{flag} {path}: {reason}; name a file that this user may read (`headwater nats-config` generates keys)"
        ) from error


def _check_seed(path: str) -> None:
    try:
        nkeys.from_seed(bytearray(_text("--nats-nkey-file", path).strip().encode()))
    except (nkeys.NkeysError, ValueError) as error:
        raise AccessDenied(
            f"--nats-nkey-file {path}: contains no nkey seed; a seed is one line that starts with SU"
        ) from error


def _check_creds(path: str) -> None:
    text = _text("--nats-creds-file", path)
    for mark in _CREDS_MARKS:
        # Without this marker nats-py would search the file without end.
        if mark not in text:
            raise AccessDenied(f"--nats-creds-file {path}: has no line with {mark!r}; is it a .creds file?")
