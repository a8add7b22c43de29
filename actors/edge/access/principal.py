"""Who sent a request, and what it may do. Every request has a `Principal`; it travels in `Call.principal`."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from headwater.actors.edge.access.refusals import forbidden
from headwater.schemas.tables.api_key import EVERY, PERMISSIONS, Permission, Scopes, UsageLimits

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
        """Whether it showed a credential. Without authentication no request has one, and everything is permitted."""
        return bool(self.credential)

    def permits(self, permission: Permission) -> bool:
        """Whether it has this permission."""
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
        """Whether it may use a model that has these names."""
        allowed = self.scopes.models
        return EVERY in allowed or any(name in allowed for name in names)


ANONYMOUS: Final = Principal(scopes=Scopes(permissions=tuple(PERMISSIONS)))
"""Every client of an edge without authentication."""
