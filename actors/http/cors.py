"""CORS: which web pages may read what an edge answers. Off unless origins are listed.

Around the application, so that every response has the headers: errors, streams and the answers to preflights, which come
without credentials and are answered before anything else looks at them.
"""

import re
from typing import Any, Final

from headwater.actors.http.asgi import Asgi, HeaderAdder, Headers, Receive, Scope, Send

ANY_ORIGIN: Final = "*"
MAX_AGE_S: Final = 600

METHODS: Final = b"GET, POST, DELETE, OPTIONS"
EXPOSED: Final = (
    b"retry-after, x-request-id, x-should-retry, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,?#]+", re.IGNORECASE)

REQUEST_HEADERS_MAX: Final = 1024

_READ: Final = (b"origin", b"access-control-request-method", b"access-control-request-headers")


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises `ValueError` for what is no origin: browsers would send something else, and never be let in."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin: give SCHEME://HOST[:PORT] without a path, or *")


def allow_origins(app: Asgi, origins: tuple[str, ...]) -> Asgi:
    """The application, readable by pages of these origins (`https://chat.example`, or `*` for all)."""
    return Cors(app, frozenset(origin.lower().encode() for origin in origins)) if origins else app


class Cors:
    """See the module."""

    def __init__(self, app: Asgi, origins: frozenset[bytes]) -> None:
        self._app = app
        self._origins = origins
        self._any = ANY_ORIGIN.encode() in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or pass the request on and add the headers to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = {name: value for name, value in scope["headers"] if name in _READ}
        headers = self._headers(given.get(b"origin", b""))
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in given:
            await send({"type": "http.response.start", "status": 204, "headers": headers + _preflight(given)})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, HeaderAdder(send, lambda: headers))

    def _headers(self, origin: bytes) -> Headers:
        """Headers of a response to this origin. Caches must know that another origin gets others."""
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        vary: Headers = [(b"vary", b"origin")]
        if origin.lower() not in self._origins:
            return vary
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            *vary,
        ]


def _preflight(given: dict[bytes, Any]) -> Headers:
    asked: bytes = given.get(b"access-control-request-headers", b"")
    # Keys and clients' own headers have many names; which origins may send them is what is limited.
    headers = asked if len(asked) <= REQUEST_HEADERS_MAX else b"authorization, content-type"
    return [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", headers),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
    ]
