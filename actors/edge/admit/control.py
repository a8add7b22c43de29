"""Access control of an edge: the one call of the HTTP application that turns a request's headers into a `Principal`, and the API keys.

path                  requires
/, /live, /health     nothing
/metrics              the scope `metrics`
/admin/…              the scope `admin`
/v1/models, …         a credential: a list shows the models that it permits
every other path      the scope `endpoints:NAME`, by the first segment of the path after the version

Every edge has the API keys of a namespace in memory: the table's present state, kept current by a watch. A request costs a look-up, one BLAKE2b
digest and a comparison, a few microseconds, so no verified key is cached and a revoked one has nowhere to survive. While the table cannot be
reached, the keys that were known last are accepted.

A key has an id and a secret. The id finds the record and may appear in logs. The secret is 256 random bits, and only a digest of
it is stored. The digest is fast (BLAKE2b, with the id as its key) because guessing 256 random bits is out of reach at any speed;
the slow hashes that passwords need would cost milliseconds per request and protect nothing here. A fixed form lets scanners find
keys that were published by mistake: hw-[0-9a-f]{12}-[0-9a-f]{64}.
"""

import asyncio
import secrets
from collections.abc import Coroutine
from hashlib import blake2b
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from headwater.actors.edge.admit.principal import (
    ANONYMOUS,
    INVALID_KEY,
    NO_CREDENTIAL,
    CacheSalts,
    Principal,
    read_shared_prompts,
    unauthenticated,
)
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.http.asgi import Headers, Scope
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.tables import ApiKey, Scopes, SecretDigest

if TYPE_CHECKING:
    from headwater.actors.edge.admit.oidc import SigningKeys, TokenVerifier

PREFIX: Final = "hw-"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32

_ID_END: Final = len(PREFIX) + 2 * ID_BYTES
_LENGTH: Final = _ID_END + 1 + 2 * SECRET_BYTES


class PresentedKey(NamedTuple):
    """A key as a client sent it: of the right form, its digits and its secret not yet verified."""

    id: str
    secret: bytes


def new_id() -> str:
    """An id for a new key."""
    return secrets.token_hex(ID_BYTES)


def new_secret() -> str:
    """A secret for a new key."""
    return secrets.token_hex(SECRET_BYTES)


def key_text(key_id: str, secret: str) -> str:
    """The key as its owner uses it."""
    return f"{PREFIX}{key_id}-{secret}"


def parse_key(text: bytes) -> PresentedKey | None:
    """The parts of a key; None if it is not of the form."""
    # Not a regular expression: that would take a third of an authentication.
    if len(text) != _LENGTH or not text.startswith(b"hw-") or text[_ID_END : _ID_END + 1] != b"-":
        return None
    return PresentedKey(text[len(PREFIX) : _ID_END].decode("latin-1"), text[_ID_END + 1 :])


def digest_of(key_id: str, secret: bytes) -> str:
    """Return what is stored of a secret, in hex."""
    return blake2b(secret, digest_size=32, key=key_id.encode(), person=b"headwater key").hexdigest()


def same_digest(first: str, second: str) -> bool:
    """Return whether two digests are equal, in a time that does not depend on where they differ."""
    return compare_digest(first, second)


# The keys of a namespace in memory.

RETRY_S: Final = 0.5

NO_DIGESTS: Final = (SecretDigest("0" * 64),)
"""Compared for an unknown id, so that its answer takes as long as that of a wrong secret."""

_log = structlog.get_logger("headwater.access")


class KnownKey(NamedTuple):
    """What verification needs of one key. `expires_s` 0: never."""

    digests: tuple[SecretDigest, ...]
    expires_s: int
    principal: Principal


class KeyRing:
    """The API keys of a namespace, kept current by `run`. `known` is set once the table was read."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = ApiKeyTable(table)
        self._clock = clock
        self._keys: dict[str, KnownKey] = {}
        self.known = asyncio.Event()

    def __len__(self) -> int:
        return len(self._keys)

    async def run(self) -> None:
        """Follow the table until cancelled."""
        while True:
            try:
                async for changes in self._table.watch():
                    for change in changes:
                        self._take(change.id, change.key)
                    self.known.set()
            except LogError as error:
                _log.warning("api_keys_not_followed", reason=str(error))
            await self._clock.sleep(RETRY_S)

    def _take(self, key_id: str, key: ApiKey | None) -> None:
        if key is None or key.id != key_id:
            self._keys.pop(key_id, None)
        else:
            self._keys[key_id] = KnownKey(key.digests, key.expires_s, principal_of(key))

    def verify(self, presented: PresentedKey) -> Principal:
        """The owner of a key. Raises `ApiError` 401, in the same words and time whatever is wrong with it."""
        found = self._keys.get(presented.id)
        now_s = self._clock.wall_ns() // 1_000_000_000
        digest = digest_of(presented.id, presented.secret)
        matches = False
        for one in found.digests if found is not None else NO_DIGESTS:
            matches |= same_digest(one.digest, digest) and not _is_past(one.until_s, now_s)
        if found is None or not matches or _is_past(found.expires_s, now_s):
            raise unauthenticated(INVALID_KEY)
        return found.principal


def principal_of(key: ApiKey) -> Principal:
    """The sender of requests with this key."""
    return Principal(key.tenant, f"key-{key.id}", key.scopes, key.limits, key.model_limits, key.cache_sharing)


def _is_past(until_s: int, now_s: int) -> bool:
    return bool(until_s) and now_s >= until_s


# Access control.

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
