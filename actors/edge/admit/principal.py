"""The sender of a request, what it is permitted, and the refusals of what it is not."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from headwater.actors.edge.model.catalog import Model, ModelCatalog
from headwater.actors.http.asgi import Headers
from headwater.actors.http.errors import ApiError, no_model
from headwater.schemas.tables import EVERY, PERMISSIONS, Permission, Scopes, UsageLimits

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
