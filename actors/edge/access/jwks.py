"""The public keys of a token issuer: from a file, or from a URL with rotation.

The URL is read at start, every `REFRESH_S`, and when a token names an unknown key, though at most once in
`REFRESH_S_MIN`: tokens with made-up key ids must not become requests to the issuer. While it cannot be read, the keys
that were read last are kept.
"""

import asyncio
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from jwt import PyJWK, PyJWTError

from headwater.actors.edge.access.settings import OidcSettings, check_jwks_url
from headwater.schemas.clock import Clock

REFRESH_S: Final = 3600.0
REFRESH_S_MIN: Final = 30.0
FETCH_S: Final = 5.0
BYTES_MAX: Final = 1024 * 1024
KEYS_MAX: Final = 256

ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Asymmetric algorithms only: with a symmetric one, a process that can verify tokens can make them."""

Fetch = Callable[[], bytes]

_log = structlog.get_logger("headwater.access")


class SigningKeys:
    """The issuer's keys by key id. `fetch` blocks; it raises `OSError`."""

    def __init__(self, fetch: Fetch, clock: Clock, *, rotates: bool) -> None:
        self._fetch = fetch
        self._clock = clock
        self._rotates = rotates
        self._keys: dict[str, PyJWK] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_s = -REFRESH_S_MIN

    async def run(self) -> None:
        """Read the keys, then again from time to time. Runs until cancelled."""
        while True:
            await self._refresh()
            await self._clock.sleep(REFRESH_S if self._keys else REFRESH_S_MIN)

    @property
    def available(self) -> bool:
        """Whether any keys were read."""
        return bool(self._keys)

    async def find(self, key_id: str) -> PyJWK | None:
        """The key with this id; of an issuer with one key that has no id, that one. May read the keys again."""
        found = self._known(key_id)
        if found is None and self._rotates:
            await self._refresh()
            found = self._known(key_id)
        return found

    def _known(self, key_id: str) -> PyJWK | None:
        if not key_id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    async def _refresh(self) -> None:
        """Read the keys, unless that was done just now; concurrent calls wait for the same reading."""
        if self._reading is None:
            if self._clock.monotonic_s() - self._read_s < REFRESH_S_MIN:
                return
            self._read_s = self._clock.monotonic_s()
            self._reading = asyncio.create_task(self._read(), name="signing keys")
        # A client that disconnects must not end the reading that others wait for.
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            keys = parse_jwks(await asyncio.to_thread(self._fetch))
            if keys.keys() != self._keys.keys():
                _log.info("signing_keys_read", keys=len(keys))
            self._keys = keys
        except (OSError, ValueError) as error:
            _log.error("signing_keys_not_read", reason=str(error)[:200], known=len(self._keys))
        finally:
            self._reading = None


def parse_jwks(data: bytes) -> dict[str, PyJWK]:
    """The signing keys of a JWKS document, by key id. Raises `ValueError` if there is none that can be used."""
    try:
        document = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"the JWKS document is not valid JSON: {error}") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("the JWKS document has no list `keys`")
    found: dict[str, PyJWK] = {}
    for entry in entries[:KEYS_MAX]:
        key = _signing_key(entry)
        if key is not None:
            found[key.key_id or ""] = key
    if not found:
        raise ValueError(f"the JWKS document has no signing key of {', '.join(ALGORITHMS)}")
    return found


def _signing_key(entry: Any) -> PyJWK | None:
    """One entry as a key; None for one of another use or an unknown type, which issuers may add at any time."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig" or entry.get("kty") == "oct":
        return None
    try:
        key = PyJWK(entry)
    except (PyJWTError, ValueError, TypeError, AttributeError):
        return None
    return key if key.algorithm_name in ALGORITHMS else None


def signing_keys(settings: OidcSettings, clock: Clock) -> SigningKeys:
    """The issuer's keys, from the file or the URL that the settings name."""
    if settings.jwks_file:
        return SigningKeys(read_file(settings.jwks_file), clock, rotates=False)
    return SigningKeys(read_url(settings.jwks_url), clock, rotates=True)


def read_file(path: str) -> Fetch:
    """Reads a JWKS file."""
    return lambda: Path(path).read_bytes()


def read_url(url: str) -> Fetch:
    """Reads a JWKS URL. Raises `ValueError` for one that is neither https nor http on loopback."""
    check_jwks_url(url)

    def fetch() -> bytes:
        request = urllib.request.Request(
            url, headers={"accept": "application/json", "user-agent": "headwater"}
        )
        with _OPENER.open(request, timeout=FETCH_S) as response:
            data: bytes = response.read(BYTES_MAX + 1)
        if len(data) > BYTES_MAX:
            raise OSError(f"the JWKS document is larger than {BYTES_MAX} bytes")
        return data

    return fetch


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to URLs that would be accepted themselves."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """See `HTTPRedirectHandler.redirect_request`."""
        try:
            check_jwks_url(newurl)
        except ValueError as error:
            raise OSError(f"redirected to a URL that {error}") from error
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER: Final = urllib.request.build_opener(_SafeRedirects())
