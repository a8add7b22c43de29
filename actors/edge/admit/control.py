"""Access control of an edge: the one call of the HTTP application that turns a request's headers into a `Principal`.

The principal says what the sender of a request is permitted, and has the salt that keeps its cached prompts apart.

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

Cache salts: cached KV blocks of one tenant never match another tenant's prompts.

    salt = base64url(HMAC-SHA256(namespace key, domain || tenant || the client's own cache_salt))

Engines mix the salt into the hash of a prompt's first block, and every later block's hash includes the one before; the
block hashes that routers and the log see are seeded by it as well. So a tenant measures the same time to first token
whether or not another tenant sent the same prompt, and who reads the log cannot test guesses about prompts without the
namespace key. One salt holds for a whole prompt.

Sharing. Requests of tenants that opted in (`cache_sharing`), whose system prompt is exactly one of those that the operator
publishes, and that have no cache_salt of their own, get that system prompt's salt instead. They share its blocks, and so
could detect what follows it in each other's prompts: sharing is for tenants that trust each other, or prompts whose
continuation is no secret.
"""

import asyncio
import hmac
import secrets
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from headwater.actors.edge.catalog import Model, ModelCatalog
from headwater.actors.edge.settings import AccessSettings, HideCachedTokens
from headwater.actors.http.asgi import Headers, Scope
from headwater.actors.http.errors import ApiError, forbidden, no_model, unauthenticated
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.subjects import SALT_KEY
from headwater.schemas.tables import (
    EVERY,
    PERMISSIONS,
    ApiKey,
    ModelCard,
    Permission,
    Scopes,
    SecretDigest,
    UsageLimits,
)

if TYPE_CHECKING:
    from headwater.actors.edge.admit.oidc import SigningKeys, TokenVerifier

RETRY_S: Final = 0.5
"""Seconds until a table that did not answer is read again."""

_log = structlog.get_logger("headwater.access")

NO_CREDENTIAL: Final = (
    "No API key was given. Send one in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
)
INVALID_KEY: Final = "The API key is not valid: it is unknown, revoked or expired."


# The principal of a request, which travels in `Call.principal`.

NO_MODEL_LIMITS: Final[Mapping[str, UsageLimits]] = {}


class Principal(NamedTuple):
    """The sender of a request.

    `tenant` owns its data and its cached prompts; `credential` names the API key (`key-ID`) or the token's subject
    (a digest) in logs and for limits, never a secret. Both are empty without authentication.
    """

    tenant: str = ""
    credential: str = ""
    scopes: Scopes = Scopes()
    limits: UsageLimits = UsageLimits()
    model_limits: Mapping[str, UsageLimits] = NO_MODEL_LIMITS
    cache_sharing: bool = False

    @property
    def authenticated(self) -> bool:
        """True if the principal showed a credential. Without authentication no request has one, and everything is permitted."""
        return bool(self.credential)

    def permits(self, permission: Permission) -> bool:
        """Return whether the principal has this permission."""
        return permission in self.scopes.permissions

    def require(self, permission: Permission, param: str) -> None:
        """Raises `ApiError` 403 naming the scope that `param` (a header, a field, a path) requires."""
        if not self.permits(permission):
            raise forbidden(f"{param} requires the scope {permission!r}, which this key lacks.", param=param)

    def require_endpoint(self, endpoint: str) -> None:
        """Raises `ApiError` 403 naming the scope, unless it may use this endpoint."""
        allowed = self.scopes.endpoints
        if EVERY not in allowed and endpoint not in allowed:
            raise forbidden(f"This endpoint requires the scope 'endpoints:{endpoint}', which this key lacks.")

    def permits_model(self, *names: str) -> bool:
        """Return whether the principal may use a model that has these names."""
        allowed = self.scopes.models
        return EVERY in allowed or any(name in allowed for name in names)


ANONYMOUS: Final = Principal(scopes=Scopes(permissions=tuple(PERMISSIONS)))
"""Every client of an edge without authentication."""


# The models that a principal may use: the only way from a request's `model` to a `Model`.


def permitted_models(models: ModelCatalog, principal: Principal) -> list[Model]:
    """All served models that the principal may use."""
    return [model for model in models.all() if _permits(principal, model)]


def permitted_model(models: ModelCatalog, principal: Principal, name: str) -> Model:
    """The model with this name or alias.

    Raises `ApiError` 403 naming the scope, equally whether another tenant's model exists or not, and 404 for a model
    that would be permitted but is not served.
    """
    try:
        model = models.get(name)
    except ApiError as error:
        if not principal.authenticated:
            raise
        if principal.permits_model(name):
            available = [model.card.name for model in permitted_models(models, principal)]
            raise no_model(name, available) from error
    else:
        if _permits(principal, model):
            return model
    raise forbidden(
        f"The model {name[:256]!r} requires the scope 'models:{name[:256]}', which this key lacks.",
        param="model",
    )


def _permits(principal: Principal, model: Model) -> bool:
    return principal.permits_model(model.card.name, *model.card.aliases)


# Cache salts.

KEY_BYTES: Final = 32
REMEMBERED_MAX: Final = 4096


class CacheSalt(NamedTuple):
    """The salt of one prompt. `hides_usage`: responses must not say how much of the prompt was cached."""

    value: str = ""
    hides_usage: bool = False


NO_SALT: Final = CacheSalt()


class CacheSalts:
    """Derives salts from the namespace key, which `load` must have read."""

    def __init__(
        self,
        hide: HideCachedTokens = "shared",
        shared_prompts: Iterable[str] = (),
        *,
        allow_unsalted_engines: bool = False,
    ) -> None:
        self._hide: HideCachedTokens = hide
        self._shared = frozenset(shared_prompts)
        self._allow_unsalted = allow_unsalted_engines
        self._key = b""
        self._tenants: OrderedDict[str, str] = OrderedDict()

    async def load(self, table: Table, clock: Clock) -> None:
        """Read the namespace key; make it if there is none. Retries until the table answers."""
        self._key = await wait_for_namespace_key(table, clock)

    def salt_of(
        self, principal: Principal, card: ModelCard, client_salt: str = "", system: str | None = None
    ) -> CacheSalt:
        """The salt of a prompt whose first message is the system prompt `system`; None: it has none.

        Without authentication it is the client's own. Raises `ApiError` 403 for a model whose engine has no salts.
        """
        if not principal.authenticated:
            return CacheSalt(client_salt, self._hide == "always")
        if "cache_salt" not in card.capabilities:
            if self._allow_unsalted:
                return CacheSalt("", self._hide != "never")
            raise forbidden(
                f"{card.name} cannot be served to authenticated tenants: its engine, {card.engine}, has no cache salts, "
                "so tenants could detect each other's prompts. The operator can permit it "
                "(--allow-unsalted-engines).",
                param="model",
                code="no_tenant_isolation",
            )
        if principal.cache_sharing and not client_salt and system is not None and system in self._shared:
            return CacheSalt(self._derive(b"shared", system.encode()), self._hide != "never")
        return CacheSalt(self._of_tenant(principal.tenant, client_salt), self._hide == "always")

    def _of_tenant(self, tenant: str, client_salt: str) -> str:
        if client_salt:
            return self._derive(b"tenant", tenant.encode(), client_salt.encode())
        salt = self._tenants.get(tenant)
        if salt is None:
            salt = self._tenants[tenant] = self._derive(b"tenant", tenant.encode())
            if len(self._tenants) > REMEMBERED_MAX:
                self._tenants.popitem(last=False)
        return salt

    def _derive(self, domain: bytes, *parts: bytes) -> str:
        if not self._key:
            raise RuntimeError("the namespace key has not been read")
        # Each part with its length, so that no two lists of parts are the same text.
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (domain, *parts))
        return urlsafe_b64encode(hmac.digest(self._key, text, sha256)).rstrip(b"=").decode()


async def namespace_key(table: Table) -> bytes:
    """The key that all edges of a namespace derive salts from, made once by the first of them. Raises `LogError`."""
    while True:
        entry = await table.get(SALT_KEY)
        if entry is not None and entry.value:
            return bytes.fromhex(entry.value.decode())
        # Only one of several edges creates it; the others read what that one wrote.
        await table.create(SALT_KEY, secrets.token_hex(KEY_BYTES).encode())


async def wait_for_namespace_key(table: Table, clock: Clock) -> bytes:
    """See `namespace_key`; tries again until the table answers."""
    while True:
        try:
            return await namespace_key(table)
        except LogError as error:
            _log.warning("namespace_key_not_read", reason=str(error))
            await clock.sleep(RETRY_S)


def read_shared_prompts(folder: str) -> list[str]:
    """The system prompts that the operator publishes, one per file. Raises `OSError` and `UnicodeDecodeError`."""
    return [path.read_text("utf-8") for path in sorted(Path(folder).glob("*.txt"))] if folder else []


# API keys: their text, and what is stored of them.

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


# The keys of a namespace in memory.

NO_DIGESTS: Final = (SecretDigest("0" * 64),)
"""Compared for an unknown id, so that its answer takes as long as that of a wrong secret."""


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
        entry = self._keys.get(presented.id)
        now_s = self._clock.wall_ns() // 1_000_000_000
        digest = digest_of(presented.id, presented.secret)
        matches = False
        for stored_digest in entry.digests if entry is not None else NO_DIGESTS:
            # In a time that does not depend on where they differ.
            matches |= hmac.compare_digest(stored_digest.digest, digest) and not _is_past(
                stored_digest.until_s, now_s
            )
        if entry is None or not matches or _is_past(entry.expires_s, now_s):
            raise unauthenticated(INVALID_KEY)
        return entry.principal


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
    credential = b""
    for name, value in headers:
        if name == b"x-api-key":
            candidate = value.strip()
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise unauthenticated("The authorization header must have the form `Bearer KEY`.")
            candidate = rest.strip()
        else:
            continue
        if not candidate:
            raise unauthenticated(NO_CREDENTIAL)
        # Clients of two APIs in one may send both headers; which one counts must not depend on their order.
        if credential and candidate != credential:
            raise unauthenticated("The request has several API keys that differ; send one.")
        credential = candidate
    if not credential:
        raise unauthenticated(NO_CREDENTIAL)
    if len(credential) > CREDENTIAL_BYTES_MAX:
        raise unauthenticated(f"The API key is longer than {CREDENTIAL_BYTES_MAX} bytes.")
    return credential


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
        owner = await self._tokens.verify(credential)
        return Principal(owner.tenant, owner.credential, owner.scopes)


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
        loops: list[tuple[Coroutine[Any, Any, None], str]] = []
        if self._ring is not None:
            loops.append((self._ring.run(), "API keys"))
        if self._signing_keys is not None:
            loops.append((self._signing_keys.run(), "signing keys"))
        return loops

    async def prepare(self) -> None:
        """Return once requests can be authenticated. The loops must run."""
        if self.control.authenticates:
            await self.control.salts.load(self._ports.secrets, self._ports.clock)
        if self._ring is not None:
            await self._ring.known.wait()
            if not len(self._ring) and self._signing_keys is None:
                _log.warning("no_api_keys", remedy="create one with `headwater keys create --tenant NAME`")
