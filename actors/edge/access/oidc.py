"""Tokens of an OpenID Connect identity provider (JWTs, RFC 7519, as access tokens of RFC 9068 are) as credentials.

Verifying a signature takes 50 to 200 microseconds, so verified tokens are remembered by digest, bounded, until they
expire or the issuer's keys were read again. Errors say which check failed, not what the token or the keys contain.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import jwt

from headwater.actors.edge.access.jwks import ALGORITHMS, SigningKeys
from headwater.actors.edge.access.principal import Principal
from headwater.actors.edge.access.refusals import unauthenticated
from headwater.actors.edge.access.scope_words import parse_scopes
from headwater.actors.edge.access.settings import OidcSettings
from headwater.actors.http.errors import overloaded
from headwater.schemas.clock import Clock

LEEWAY_S: Final = 30
"""Difference between the issuer's clock and this one's that is tolerated."""

REMEMBERED_MAX: Final = 4096
REMEMBERED_S: Final = 300.0
"""How many verified tokens are remembered, and for how long at most: a key that the issuer withdrew ends with it."""

TENANT_CHARACTERS_MAX: Final = 128
CODE: Final = "invalid_token"


class VerifiedToken(NamedTuple):
    """The sender that a token stands for, until a time of the monotonic clock."""

    principal: Principal
    until_s: float


class TokenVerifier:
    """Verifies tokens of one issuer."""

    def __init__(self, settings: OidcSettings, keys: SigningKeys, clock: Clock) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock
        self._remembered: OrderedDict[bytes, VerifiedToken] = OrderedDict()

    async def verify(self, token: bytes) -> Principal:
        """The sender that a token stands for. Raises `ApiError` 401, and 503 while there are no keys to check with."""
        digest = blake2b(token, digest_size=32).digest()
        now_s = self._clock.monotonic_s()
        known = self._remembered.get(digest)
        if known is not None and now_s < known.until_s:
            self._remembered.move_to_end(digest)
            return known.principal
        claims = await self._claims(token)
        principal = principal_of(claims, self._settings)
        left_s = float(claims["exp"]) + LEEWAY_S - self._clock.wall_ns() / 1e9
        self._remembered[digest] = VerifiedToken(principal, now_s + min(left_s, REMEMBERED_S))
        self._remembered.move_to_end(digest)
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return principal

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
    """Which check failed."""
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


def principal_of(claims: Mapping[str, Any], settings: OidcSettings) -> Principal:
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
    return Principal(tenant, credential, parse_scopes(words))


def _is_plain(tenant: str) -> bool:
    printable = tenant.isascii() and tenant.isprintable() and " " not in tenant
    return printable and len(tenant) <= TENANT_CHARACTERS_MAX


def _words(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list):
        return [word for word in value if isinstance(word, str)]
    return ()
