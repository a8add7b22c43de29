"""Tokens of an OpenID Connect identity provider (JWTs, RFC 7519, as access tokens of RFC 9068 are) as credentials.

Verifying a signature takes 50 to 200 microseconds, so verified tokens are remembered by digest, bounded, until they
expire or the issuer's keys were read again. Errors say which check failed, not what the token or the keys contain.

The URL of the issuer's keys is read at start, every `REFRESH_S`, and when a token names an unknown key, though at most once in
`REFRESH_S_MIN`: tokens with made-up key ids must not become requests to the issuer. While it cannot be read, the keys
that were read last are kept.
"""

import asyncio
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import jwt
import msgspec
import structlog
from jwt import PyJWK, PyJWTError

from headwater.actors.edge.settings import OidcSettings, check_jwks_url, jwks_path
from headwater.actors.http.errors import overloaded, unauthenticated
from headwater.schemas.clock import Clock
from headwater.schemas.tables import Scopes

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
        """Return whether any keys were read."""
        return bool(self._keys)

    async def find(self, key_id: str) -> PyJWK | None:
        """The key with this id; of an issuer with one key that has no id, that one. May read the keys again."""
        key = self._known(key_id)
        if key is None and self._rotates:
            await self._refresh()
            key = self._known(key_id)
        return key

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
    keys: dict[str, PyJWK] = {}
    for entry in entries[:KEYS_MAX]:
        key = _signing_key(entry)
        if key is not None:
            keys[key.key_id or ""] = key
    if not keys:
        raise ValueError(f"the JWKS document has no signing key of {', '.join(ALGORITHMS)}")
    return keys


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
    if path := jwks_path(settings.jwks_url):
        return SigningKeys(read_file(path), clock, rotates=False)
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


# Verification of tokens.

LEEWAY_S: Final = 30
"""Difference between the issuer's clock and this one's that is tolerated."""

REMEMBERED_MAX: Final = 4096
REMEMBERED_S: Final = 300.0
"""How many verified tokens are remembered, and for how long at most: a key that the issuer withdrew ends with it."""

TENANT_CHARACTERS_MAX: Final = 128
CODE: Final = "invalid_token"


class TokenOwner(NamedTuple):
    """The sender that a token stands for: its tenant, a digest that names it, and what it is permitted."""

    tenant: str
    credential: str
    scopes: Scopes


class TokenVerifier:
    """Verifies tokens of one issuer."""

    def __init__(self, settings: OidcSettings, keys: SigningKeys, clock: Clock) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock
        self._remembered: OrderedDict[bytes, tuple[TokenOwner, float]] = OrderedDict()

    async def verify(self, token: bytes) -> TokenOwner:
        """The sender that a token stands for. Raises `ApiError` 401, and 503 while there are no keys to check with."""
        digest = blake2b(token, digest_size=32).digest()
        now_s = self._clock.monotonic_s()
        verified = self._remembered.get(digest)
        if verified is not None and now_s < verified[1]:
            self._remembered.move_to_end(digest)
            return verified[0]
        claims = await self._claims(token)
        owner = owner_of(claims, self._settings)
        left_s = float(claims["exp"]) + LEEWAY_S - self._clock.wall_ns() / 1e9
        self._remembered[digest] = owner, now_s + min(left_s, REMEMBERED_S)
        self._remembered.move_to_end(digest)
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return owner

    async def _claims(self, token: bytes) -> Mapping[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise unauthenticated("The token is not a valid JWT.", CODE) from error
        if header.get("alg") not in ALGORITHMS:
            raise unauthenticated("The token's algorithm is not accepted.", CODE)
        key = await self._keys.find(str(header.get("kid") or ""))
        if key is None:
            if not self._keys.available:
                raise overloaded("The keys of the identity provider cannot be read; retry.", 5.0)
            raise unauthenticated("The token is signed with an unknown key.", CODE)
        settings = self._settings
        now_s = self._clock.wall_ns() / 1e9
        try:
            # The algorithm is the key's, not the token's: a token must not choose how it is verified.
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=list(settings.audience),
                issuer=settings.issuer,
                # The times are checked below, by the edge's own clock.
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError as error:
            raise unauthenticated(_explain(error), CODE) from error
        _check_times(claims, now_s)
        return claims


def _explain(error: jwt.PyJWTError) -> str:
    """Return which check failed, as a sentence for the client."""
    match error:
        case jwt.InvalidAudienceError():
            return "The token is for another audience."
        case jwt.InvalidIssuerError():
            return "The token is of another issuer."
        case jwt.MissingRequiredClaimError():
            return f"The token lacks the claim {error.claim!r}."
        case jwt.InvalidSignatureError():
            return "The token's signature is not valid."
        case _:
            return "The token is not valid."


def _check_times(claims: Mapping[str, Any], now_s: float) -> None:
    for name in ("exp", "nbf"):
        value = claims.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
            raise unauthenticated(f"The token's claim {name!r} is not a time.", CODE)
    if now_s >= claims["exp"] + LEEWAY_S:
        raise unauthenticated("The token has expired.", "token_expired")
    if now_s < claims.get("nbf", 0) - LEEWAY_S:
        raise unauthenticated("The token is not valid yet.", CODE)


def owner_of(claims: Mapping[str, Any], settings: OidcSettings) -> TokenOwner:
    """The sender that these claims describe. Raises `ApiError` 401 if they name no tenant."""
    tenant = claims.get(settings.tenant_claim)
    if not isinstance(tenant, str) or not tenant or not _is_plain(tenant):
        raise unauthenticated(
            f"The token's claim {settings.tenant_claim!r} must name the tenant, in 1 to {TENANT_CHARACTERS_MAX} "
            "printable ASCII characters without spaces.",
            CODE,
        )
    words = [*settings.default_scopes, *_words(claims.get(settings.scopes_claim))]
    subject = f"{settings.issuer} {claims.get('sub', '')} {tenant}".encode()
    credential = f"token-{blake2b(subject, digest_size=8).hexdigest()}"
    return TokenOwner(tenant, credential, Scopes.parse(words))


def _is_plain(tenant: str) -> bool:
    printable = tenant.isascii() and tenant.isprintable() and " " not in tenant
    return printable and len(tenant) <= TENANT_CHARACTERS_MAX


def _words(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list):
        return [word for word in value if isinstance(word, str)]
    return ()
