"""The console's HTTP application: the page, its API, control commands, which it passes to the admin application, and who may see what of it.

    GET  /                    the page; /assets/… its files
    GET  /api/…               JSON views (ops.console.views, .rates, .requests, .prefixes, .records)
    GET  /api/live            server-sent events: how far the history reaches
    POST /admin/workers/…     control commands, for an operator's token

The page comes from this origin alone: its policy forbids everything else. There is no CORS, and requests for the API that a browser sends
for a page of another site are refused, as are those under another host name on loopback, which a rebound DNS name would have.

On loopback everyone of this machine may read; elsewhere only who shows a token or a key.
"""

import asyncio
import contextlib
import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Final, Literal

import msgspec
import structlog

from headwater import __version__
from headwater.actors.admin import AdminApp, TokenAuthenticator
from headwater.actors.edge.admit.control import AccessControl, credential_of
from headwater.actors.http.asgi import Asgi, ClientGone, Disconnect, Headers, Receive, Scope, Send, respond
from headwater.actors.http.body import require_method
from headwater.actors.http.errors import ApiError, forbidden, unauthenticated
from headwater.events.ports import LogError
from headwater.ops.console import prefixes, rates, records, requests, views
from headwater.ops.console.pools import Pools
from headwater.ops.console.query import Query, not_found
from headwater.ops.history.history import History, NotKept

ConsoleScope = Literal["read", "tenants", "contents", "control"]
ConsoleScopes = frozenset[ConsoleScope]

READ: Final[ConsoleScopes] = frozenset({"read"})
LOCAL: Final[ConsoleScopes] = frozenset({"read", "tenants", "contents"})
"""Of a client on loopback without a token: whoever is on this machine can read the log as well."""
EVERYTHING: Final[ConsoleScopes] = LOCAL | {"control"}

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
            raise forbidden("Pages of other sites cannot use this console.", code="cross_site")
        host = headers.get(b"host", b"").decode("latin-1").rsplit(":", 1)[0]
        if self._is_open and host not in LOCAL_NAMES:
            text = f"This console answers under localhost only, not under {host[:80]!r}."
            raise forbidden(text, code="wrong_host")

    async def admit(self, scope: Scope) -> ConsoleScopes:
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


LIVE_S: Final = 0.5
PING_S: Final = 10.0

POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SECURITY: Final[Headers] = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

JSON: Final[Headers] = [*SECURITY, (b"cache-control", b"no-store")]

_log = structlog.get_logger("headwater.console")

View = Callable[[History, Query], Awaitable[views.Document]]

VIEWS: Final[dict[str, View]] = {
    "log": lambda history, _: views.log_view(history),
    "fleet": views.fleet_view,
    "lanes": views.lanes_view,
    "tree": prefixes.tree_view,
    "origin": prefixes.origin_view,
    "handoffs": views.handoffs_view,
    "stuck": views.stuck_view,
    "diff": views.diff_view,
    "requests": requests.requests_view,
    "decision": records.decision_view,
    "position": records.position_view,
    "step": records.step_view,
}


TENANT_VIEWS: Final = {
    "series": rates.series_view,
    "usage": rates.usage_view,
    "queue": rates.queue_view,
}
"""Views that tell tenants apart for who may see them."""


class Assets:
    """The files of the page, which are part of the package, read once."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, bytes, bytes]] = {}
        root = resources.files("headwater.ops.console") / "assets"
        self._read(root, "")

    def _read(self, folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            name = f"{prefix}{entry.name}"
            if entry.is_dir():
                self._read(entry, f"{name}/")
                continue
            data = entry.read_bytes()
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            if kind.startswith("text/") or kind.endswith(("javascript", "json")):
                kind += "; charset=utf-8"
            tag = b'"%s"' % hashlib.sha256(data).hexdigest()[:32].encode()
            self._files[name] = data, kind.encode(), tag

    async def answer(self, name: str, scope: Scope, send: Send) -> None:
        """Send a file. Raises `ApiError` 404."""
        asset = self._files.get(name)
        if asset is None:
            raise not_found(f"There is no {scope['path'][:100]}.")
        data, kind, tag = asset
        headers: Headers = [*SECURITY, (b"etag", tag), (b"cache-control", b"no-cache")]
        if dict(scope["headers"]).get(b"if-none-match") == tag:
            await respond(send, 304, b"", headers, kind)
            return
        await respond(send, 200, data if scope["method"] != "HEAD" else b"", headers, kind)


class ConsoleApp:
    """The application. `admin` executes control commands; None where there is no right to."""

    def __init__(self, pools: Pools, access: ConsoleAccess, admin: AdminApp | None = None) -> None:
        self._pools = pools
        self._access = access
        self._admin: Asgi | None = admin
        self._assets = Assets()
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the streams of pages that follow the log: a server waits for them when it stops."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request. Raises nothing."""
        if scope["type"] != "http":
            return
        try:
            await self._route(scope, receive, send)
        except ApiError as error:
            await respond(send, error.status, error.body(), [*JSON, *error.headers])
        except NotKept as error:
            await self._fail(send, 404, str(error), "not_kept")
        except LogError as error:
            await self._fail(send, 503, f"The log cannot be read: {error}.", "log_unavailable")
        except ClientGone:
            pass
        except Exception:
            _log.exception("console_request_failed", path=scope["path"])
            await self._fail(send, 500, "Internal error; see the log of the console.", "internal")

    async def _fail(self, send: Send, status: int, message: str, code: str) -> None:
        kind = "server_error" if status >= 500 else "not_found"
        await respond(send, status, ApiError(status, message, kind=kind, code=code).body(), JSON)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/live":
            await respond(send, 200, b'{"status":"live"}', JSON)
            return
        self._access.check_origin(scope)
        if path.startswith("/admin/"):
            await self._control(scope, receive, send)
            return
        if method not in ("GET", "HEAD"):
            require_method("GET", method)
        if not path.startswith("/api/"):
            await self._assets.answer(
                "index.html" if path == "/" else path.removeprefix("/assets/"), scope, send
            )
            return
        scopes = await self._access.admit(scope)
        query = Query.parse(scope["query_string"])
        name = path.removeprefix("/api/")
        if name == "pools":
            document = await self._pools.listing()
            document |= {"scopes": sorted(scopes), "version": __version__}
        elif name == "policies":
            document = records.policies_view()
        else:
            history = await self._pools.history(query.text("pool"))
            if name == "live":
                await self._live(history, receive, send)
                return
            document = await self._view(name, history, query, scopes)
        await respond(send, 200, msgspec.json.encode(document), JSON)

    async def _view(self, name: str, history: History, query: Query, scopes: ConsoleScopes) -> views.Document:
        contents, tenants = "contents" in scopes, "tenants" in scopes
        if not tenants:
            rates.refuse_tenants(query)
        if name == "request":
            document = await requests.request_view(history, query, contents=contents)
        elif name == "events":
            document = await records.events_view(history, query, contents=contents)
        elif name == "replicas":
            document = self._pools.replicas(history.pool)
        elif name in TENANT_VIEWS:
            document = await TENANT_VIEWS[name](history, query, tenants=tenants)
        elif (view := VIEWS.get(name)) is not None:
            document = await view(history, query)
        else:
            raise not_found(f"There is no view {name[:60]!r}.")
        return document if tenants else without_tenants(document)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        scopes = await self._access.admit(scope)
        if self._admin is None or "control" not in scopes:
            raise forbidden(
                "Control of workers needs a console with --console-token-file, and one of its tokens."
            )
        await self._admin(scope, receive, send)

    async def _live(self, history: History, receive: Receive, send: Send) -> None:
        """Tell how far the history reaches whenever that changes, for as long as the page listens and the history is followed."""
        headers = [
            *JSON,
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sent, quiet_s = None, 0.0
        page = Disconnect(receive)
        try:
            while not (self._closing.is_set() or page.gone) and self._pools.follows(history):
                now = {
                    "last": history.last.position,
                    "last_ms": views.ms(history.last.stored_ns),
                    "indexed": history.indexed,
                    "indexed_from": history.indexed_from,
                    "head": history.head,
                }
                body = b""
                if now != sent:
                    sent, quiet_s, body = now, 0.0, b"data: " + msgspec.json.encode(now) + b"\n\n"
                elif quiet_s >= PING_S:
                    quiet_s, body = 0.0, b": ping\n\n"
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                self._pools.watch(history.pool)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), LIVE_S)
                quiet_s += LIVE_S
        finally:
            page.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


TENANT_FIELDS: Final = frozenset({"tenant", "answered"})
"""Fields with tenants: of views and events, and of load reports, which have those of the answers that ended."""


def without_tenants(value: Any) -> Any:
    """A document in which tenants have no names."""
    if isinstance(value, dict):
        return {
            name: ("" if name in TENANT_FIELDS else without_tenants(inner)) for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_tenants(inner) for inner in value]
    return value
