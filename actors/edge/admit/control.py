"""Access control of an edge: the one call of the HTTP application that turns a request's headers into a `Principal`.

path                  requires
/, /live, /health     nothing
/metrics              the scope `metrics`
/admin/…              the scope `admin`
/v1/models, …         a credential: a list shows the models that it permits
every other path      the scope `endpoints:NAME`, by the first segment of the path after the version
"""

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

import structlog

from headwater.actors.edge.admit.keys import PREFIX, KeyRing, parse_key
from headwater.actors.edge.admit.principal import (
    ANONYMOUS,
    INVALID_KEY,
    NO_CREDENTIAL,
    Principal,
    unauthenticated,
)
from headwater.actors.edge.admit.salts import CacheSalts, read_shared_prompts
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.asgi import Headers, Scope
from headwater.actors.runtime.persistence import Ports
from headwater.schemas.tables import Scopes

if TYPE_CHECKING:
    # Imported by an edge that verifies tokens only: the cryptography library takes a tenth of a second.
    from headwater.actors.edge.admit.oidc import SigningKeys, TokenVerifier


CREDENTIAL_BYTES_MAX: Final = 16 * 1024
"""Tokens of identity providers have hundreds of bytes, with many groups a few thousand."""


def credential_of(headers: Headers) -> bytes:
    """The one credential of a request. Raises `ApiError` 401 if there is none, or two that differ."""
    found = b""
    for name, value in headers:
        if name == b"x-api-key":
            given = value.strip()
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise unauthenticated("The authorization header must have the form `Bearer KEY`.")
            given = rest.strip()
        else:
            continue
        if not given:
            raise unauthenticated(NO_CREDENTIAL)
        # Clients of two APIs in one may send both headers; which one counts must not depend on their order.
        if found and given != found:
            raise unauthenticated("The request has several API keys that differ; send one.")
        found = given
    if not found:
        raise unauthenticated(NO_CREDENTIAL)
    if len(found) > CREDENTIAL_BYTES_MAX:
        raise unauthenticated(f"The API key is longer than {CREDENTIAL_BYTES_MAX} bytes.")
    return found


OPEN_PATHS: Final = frozenset({"/", "/live", "/health"})
"""What load balancers and orchestrators probe: they have no credentials, and the answers have no data of tenants."""

ANY_CREDENTIAL: Final = frozenset({"models", "version", "openapi.json"})

_log = structlog.get_logger("headwater.access")


class AccessControl:
    """Authenticates requests by API keys, by tokens, or by both. With neither every client is `ANONYMOUS`."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        tokens: "TokenVerifier | None" = None,
        salts: CacheSalts | None = None,
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self.salts = salts or CacheSalts()

    @property
    def authenticates(self) -> bool:
        """True if clients must show a credential."""
        return self._keys is not None or self._tokens is not None

    async def admit(self, scope: Scope) -> Principal:
        """The sender of a request. Raises `ApiError` 401 and 403. Does not suspend for an API key."""
        if not self.authenticates:
            return ANONYMOUS
        path = scope["path"]
        if path in OPEN_PATHS:
            return NO_RIGHTS
        principal = await self.authenticate(credential_of(scope["headers"]))
        endpoint = endpoint_of(path)
        if endpoint == "metrics":
            principal.require("metrics", path)
        elif endpoint == "admin":
            principal.require("admin", path)
        elif endpoint not in ANY_CREDENTIAL:
            principal.require_endpoint(endpoint)
        return principal

    def knows(self, credential: bytes) -> bool:
        """Return whether a credential has the form of one that is verified here: an API key, or with OIDC a token (JWT)."""
        is_key = credential.startswith(PREFIX.encode())
        return (is_key and self._keys is not None) or (
            self._tokens is not None and credential.count(b".") == 2
        )

    async def authenticate(self, credential: bytes) -> Principal:
        """The owner of a credential. Raises `ApiError` 401."""
        if self._keys is not None and (self._tokens is None or credential.startswith(PREFIX.encode())):
            presented = parse_key(credential)
            if presented is None:
                raise unauthenticated(INVALID_KEY)
            return self._keys.verify(presented)
        if self._tokens is None:
            raise unauthenticated(INVALID_KEY)
        return await self._tokens.verify(credential)


NO_RIGHTS: Final = Principal(credential="probe", scopes=Scopes((), ()))
"""The sender of a probe to an edge with authentication."""


def endpoint_of(path: str) -> str:
    """The name of an endpoint in scopes. `/v1/chat/completions`: chat; `/v1/responses/ID`: responses."""
    segments = path.strip("/").split("/")
    if len(segments) > 1 and segments[0] in ("v1", "v2"):
        return segments[1][:64]
    return segments[0][:64]


class AccessServices:
    """What the actor of an edge runs for its access control."""

    def __init__(self, settings: AccessSettings, ports: Ports) -> None:
        clock = ports.clock
        kinds = settings.mode.split(",")
        self._ports = ports
        self._ring = KeyRing(ports.api_keys, clock) if "keys" in kinds else None
        self._signing_keys: SigningKeys | None = None
        tokens = None
        if "oidc" in kinds:
            from headwater.actors.edge.admit.oidc import TokenVerifier, signing_keys

            self._signing_keys = signing_keys(settings.oidc, clock)
            tokens = TokenVerifier(settings.oidc, self._signing_keys, clock)
        salts = CacheSalts(
            settings.hide_cached_tokens,
            read_shared_prompts(settings.shared_prompts_dir),
            allow_unsalted_engines=settings.allow_unsalted_engines,
        )
        self.control = AccessControl(self._ring, tokens, salts)

    def loops(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        """Loops that keep its tables current, with a name for each."""
        found: list[tuple[Coroutine[Any, Any, None], str]] = []
        if self._ring is not None:
            found.append((self._ring.run(), "API keys"))
        if self._signing_keys is not None:
            found.append((self._signing_keys.run(), "signing keys"))
        return found

    async def prepare(self) -> None:
        """Return once requests can be authenticated. The loops must run."""
        if self.control.authenticates:
            await self.control.salts.load(self._ports.secrets, self._ports.clock)
        if self._ring is not None:
            await self._ring.known.wait()
            if not len(self._ring) and self._signing_keys is None:
                _log.warning("no_api_keys", remedy="create one with `headwater keys create --tenant NAME`")
