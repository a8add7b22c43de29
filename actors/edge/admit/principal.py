"""The sender of a request: what it is permitted, the refusals of what it is not, and the salt that keeps its cached prompts apart.

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

import hmac
import secrets
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from headwater.actors.edge.catalog import Model, ModelCatalog
from headwater.actors.edge.settings import HideCachedTokens
from headwater.actors.http.asgi import Headers
from headwater.actors.http.errors import ApiError, no_model
from headwater.events.ports import LogError
from headwater.events.table import Table
from headwater.schemas.clock import Clock
from headwater.schemas.subjects import SALT_KEY
from headwater.schemas.tables import EVERY, PERMISSIONS, ModelCard, Permission, Scopes, UsageLimits

NO_CREDENTIAL: Final = (
    "No API key was given. Send one in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
)
INVALID_KEY: Final = "The API key is not valid: it is unknown, revoked or expired."


def unauthenticated(message: str, code: str = "invalid_api_key") -> ApiError:
    """401: there is no credential, or it is not valid."""
    headers: Headers = [(b"www-authenticate", b"Bearer")]
    return ApiError(401, message, kind="authentication_error", code=code, headers=headers)


def forbidden(message: str, *, param: str | None = None, code: str = "insufficient_scope") -> ApiError:
    """403: the credential is valid, but does not permit this."""
    return ApiError(403, message, kind="permission_error", param=param, code=code)


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

    def require(self, permission: Permission, what: str) -> None:
        """Raises `ApiError` 403 naming the scope that `what` (a header, a field, a path) requires."""
        if not self.permits(permission):
            raise forbidden(f"{what} requires the scope {permission!r}, which this key lacks.", param=what)

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
            known = [model.card.name for model in permitted_models(models, principal)]
            raise no_model(name, known) from error
    else:
        if _permits(principal, model):
            return model
    raise forbidden(
        f"The model {name[:256]!r} requires the scope 'models:{name[:256]}', which this key lacks.",
        param="model",
    )


def _permits(principal: Principal, model: Model) -> bool:
    return principal.permits_model(model.card.name, *model.card.aliases)


# Scopes as words, the notation of tokens, errors and the command line.

MODELS = "models:"
ENDPOINTS = "endpoints:"


def parse_scopes(words: Iterable[str]) -> Scopes:
    """The scopes that these words mean. Others are ignored: a token has scopes for other services, too."""
    models: dict[str, None] = {}
    endpoints: dict[str, None] = {}
    permissions: dict[str, None] = {}
    for word in words:
        if word.startswith(MODELS):
            models[word.removeprefix(MODELS)] = None
        elif word.startswith(ENDPOINTS):
            endpoints[word.removeprefix(ENDPOINTS)] = None
        elif word in PERMISSIONS:
            permissions[word] = None
    return Scopes(tuple(models), tuple(endpoints), tuple(permissions))


def write_scopes(scopes: Scopes) -> list[str]:
    """The words of these scopes."""
    models = [MODELS + name for name in scopes.models]
    return models + [ENDPOINTS + name for name in scopes.endpoints] + list(scopes.permissions)


# Cache salts.

KEY_BYTES: Final = 32
RETRY_S: Final = 0.5
REMEMBERED_MAX: Final = 4096

_log = structlog.get_logger("headwater.access")


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
        while True:
            try:
                self._key = await namespace_key(table)
                return
            except LogError as error:
                _log.warning("namespace_key_not_read", reason=str(error))
                await clock.sleep(RETRY_S)

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
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = self._derive(b"tenant", tenant.encode())
            if len(self._tenants) > REMEMBERED_MAX:
                self._tenants.popitem(last=False)
        return known

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


def read_shared_prompts(folder: str) -> list[str]:
    """The system prompts that the operator publishes, one per file. Raises `OSError` and `UnicodeDecodeError`."""
    return [path.read_text("utf-8") for path in sorted(Path(folder).glob("*.txt"))] if folder else []
