"""Who may see what of a console: on loopback everyone of this machine may read; elsewhere only who shows a token or a key."""

from typing import Final, Literal

from headwater.actors.admin import TokenAuthenticator
from headwater.actors.edge.admit.control import AccessControl, credential_of
from headwater.actors.edge.admit.principal import forbidden, unauthenticated
from headwater.actors.http.asgi import Scope
from headwater.actors.http.errors import ApiError

ConsoleScope = Literal["read", "tenants", "contents", "control"]
Scopes = frozenset[ConsoleScope]

READ: Final[Scopes] = frozenset({"read"})
LOCAL: Final[Scopes] = frozenset({"read", "tenants", "contents"})
"""Of a client on loopback without a token: whoever is on this machine can read the log as well."""
EVERYTHING: Final[Scopes] = frozenset({"read", "tenants", "contents", "control"})

LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class ConsoleAccess:
    """Admits by tokens of a file, and by an edge's API keys and OIDC tokens.

    A token of the file, and a key with the permission `admin`, permit everything; a key with `metrics` permits to read without
    tenants and contents. `is_open`: who shows nothing may read, which is for loopback only.
    """

    def __init__(
        self, tokens: TokenAuthenticator | None, keys: AccessControl | None, *, is_open: bool
    ) -> None:
        self._tokens = tokens
        self._keys = keys
        self._is_open = is_open

    def check_origin(self, scope: Scope) -> None:
        """Refuse requests of other sites' pages, and of names that were pointed at loopback. Raises `ApiError` 403."""
        headers = dict(scope["headers"])
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and (
            scope["path"] != "/" or scope["method"] != "GET"
        ):
            raise ApiError(
                403,
                "Pages of other sites cannot use this console.",
                kind="permission_error",
                code="cross_site",
            )
        host = headers.get(b"host", b"").decode("latin-1").rsplit(":", 1)[0]
        if self._is_open and host not in LOCAL_NAMES:
            raise ApiError(
                403,
                f"This console answers under localhost only, not under {host[:80]!r}.",
                kind="permission_error",
                code="wrong_host",
            )

    async def admit(self, scope: Scope) -> Scopes:
        """What the sender of a request may see. Raises `ApiError` 401, 403 and 429."""
        shown = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
        if not shown and self._is_open:
            return LOCAL
        if not shown:
            raise unauthenticated("This console needs a token: send it as `Authorization: Bearer TOKEN`.")
        if self._keys is not None and self._keys.knows(credential_of(scope["headers"])):
            principal = await self._keys.authenticate(credential_of(scope["headers"]))
            if principal.permits("admin"):
                return EVERYTHING
            if principal.permits("metrics"):
                return READ
            raise forbidden("The console requires the scope 'admin' or 'metrics', which this key lacks.")
        if self._tokens is None:
            raise unauthenticated("The token is not valid here.")
        self._tokens.authenticate(scope)
        return EVERYTHING
