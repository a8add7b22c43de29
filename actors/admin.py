"""The admin HTTP API: the workers, control commands, and engine weights. A plain ASGI application on a port of its own.

    GET  /admin/workers                       every worker: lease, state, role, load, LoRA adapters
    GET  /admin/workers/{worker}              one of them
    POST /admin/workers/{worker}/{command}    a control command; the body is a JSON object of its arguments
    GET  /admin/pools/{pool}/weights          the engines of a pool with their weights, if it has any
    POST /admin/pools/{pool}/weights          set them: a JSON object of a weight for each engine; {} removes them
    GET  /live                                without a token: is the process up?

All paths but /live require `Authorization: Bearer TOKEN`. Every response is JSON; an error says what to do, and its
status is that of the command (`schemas.control`). There is no CORS, so pages of other sites cannot call it.
"""

from collections import OrderedDict, deque
from hmac import compare_digest
from typing import Any, NamedTuple

import msgspec
import structlog

from headwater.actors.http.asgi import ClientGone, Headers, Receive, Scope, Send, respond
from headwater.actors.http.body import Bodies, require_method
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.limits import BodyLimits
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.control import list_workers, request_weights, send_command
from headwater.schemas.clock import Clock
from headwater.schemas.control import COMMANDS, ControlReply, ControlRequest, WeightsRequest
from headwater.schemas.names import InvalidName, token

TOKEN_CHARACTERS_MIN = 16
FAILURES_MAX = 10
WINDOW_S = 60.0
ADDRESSES_MAX = 4_096
"""Addresses tracked; the one whose last failure is oldest is dropped first."""

BY_MAX = 100

_log = structlog.get_logger("headwater.admin")


class WeakToken(ValueError):
    """A token file that is not secure enough; the message says what to do."""


class Token(NamedTuple):
    """A secret, and its name in the audit."""

    name: str
    secret: str


def parse_tokens(text: str) -> list[Token]:
    """Tokens from a file: one per line, alone or after a name (`NAME TOKEN`); lines that start with # are comments.

    Raises `WeakToken` for a token that is too short, a malformed line, or a file without tokens.
    """
    tokens = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise WeakToken(f"line {number}: write TOKEN or NAME TOKEN")
        name, secret = words if len(words) == 2 else ("admin", words[0])
        if len(secret) < TOKEN_CHARACTERS_MIN or not secret.isascii():
            raise WeakToken(
                f"line {number}: a token has at least {TOKEN_CHARACTERS_MIN} ASCII characters; "
                "generate one with `openssl rand -hex 32`"
            )
        tokens.append(Token(name, secret))
    if not tokens:
        raise WeakToken("it contains no token; generate one with `openssl rand -hex 32`")
    return tokens


class TokenAuthenticator:
    """Accepts requests with a valid token, and none from an address that failed `FAILURES_MAX` times in `WINDOW_S`."""

    def __init__(self, tokens: list[Token], clock: Clock) -> None:
        self._tokens = tokens
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def authenticate(self, scope: Scope) -> str:
        """The client, for the audit: the token's name and the header X-Headwater-By. Raises `ApiError` 401 or 429."""
        address = str((scope.get("client") or ("unknown", 0))[0])
        self._check_failures(address)
        headers = {name.lower(): value for name, value in scope["headers"]}
        scheme, _, shown = headers.get(b"authorization", b"").strip().partition(b" ")
        matched = None
        for stored_token in self._tokens:
            # Always all of them: the response time must not depend on which token matched.
            if compare_digest(stored_token.secret.encode(), shown.strip()) and scheme.lower() == b"bearer":
                matched = stored_token
        if matched is None:
            self._record_failure(address)
            raise ApiError(
                401,
                "Send the header Authorization: Bearer TOKEN, with a token of the --admin-token-file.",
                kind="authentication_error",
                code="unauthorized",
            )
        by = headers.get(b"x-headwater-by", b"").decode("latin-1").strip()[:BY_MAX]
        return f"{by} (token {matched.name})" if by else f"token {matched.name}"

    def _check_failures(self, address: str) -> None:
        failures = self._failures.get(address)
        now = self._clock.monotonic_s()
        while failures and now - failures[0] >= WINDOW_S:
            failures.popleft()
        if failures is not None and not failures:
            del self._failures[address]
        elif failures is not None and len(failures) >= FAILURES_MAX:
            wait_s = WINDOW_S - (now - failures[0])
            raise ApiError(
                429,
                f"Too many failed attempts from {address} ({len(failures)}); retry after {wait_s:.0f} s.",
                kind="rate_limit_error",
                code="too_many_failed_attempts",
                retry_after_s=max(1.0, wait_s),
            )

    def _record_failure(self, address: str) -> None:
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_MAX))
        failures.append(self._clock.monotonic_s())
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
        _log.warning("admin_authentication_failed", address=address, failures=len(failures))


BODY_BYTES_MAX = 64 * 1024
COMMAND_S_MAX = 900.0

KINDS = {404: "not_found", 409: "conflict", 501: "not_supported", 502: "engine_failed", 504: "timeout"}
PREFIX = "/admin/workers"
POOLS = "/admin/pools"

HEADERS: Headers = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

_arguments = msgspec.json.Decoder(dict[str, Any])
_weights = msgspec.json.Decoder(dict[str, float])


class AdminApp:
    """The application of the admin port."""

    def __init__(self, ports: Ports, authenticator: TokenAuthenticator) -> None:
        self._ports = ports
        self._authenticator = authenticator
        self._bodies = Bodies(BodyLimits(BODY_BYTES_MAX))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request. Raises nothing."""
        if scope["type"] != "http":
            return
        try:
            status, document = await self._route(scope, receive)
            await respond(send, status, msgspec.json.encode(document), HEADERS)
        except ApiError as error:
            await respond(send, error.status, error.body(), [*HEADERS, *_extra_headers(error)])
        except ClientGone:
            pass
        except Exception:
            _log.exception("admin_request_failed", path=scope["path"])
            failure = ApiError(500, "Internal error; see the log of the admin process.", kind="server_error")
            await respond(send, 500, failure.body(), HEADERS)

    async def _route(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        path, method = scope["path"], scope["method"]
        if path == "/live":
            return 200, {"status": "live"}
        by = self._authenticator.authenticate(scope)
        if path.startswith(POOLS + "/"):
            return await self._weights(scope, receive, by)
        if path != PREFIX and not path.startswith(PREFIX + "/"):
            raise ApiError(404, f"Not found: {path[:200]}. Use {PREFIX}.", code="not_found")
        parts = [part for part in path.removeprefix(PREFIX).split("/") if part]
        if len(parts) <= 1:
            require_method("GET", method)
            workers = await list_workers(self._ports, by)
            if not parts:
                return 200, {"workers": workers}
            return 200, _find_worker(workers, parts[0])
        if len(parts) == 2:
            require_method("POST", method)
            async with self._bodies.read(scope, receive) as body:
                return await self._command(parts[0], parts[1], by, body)
        raise ApiError(404, f"Use {PREFIX}/WORKER/COMMAND.", code="not_found")

    async def _weights(self, scope: Scope, receive: Receive, by: str) -> tuple[int, Any]:
        """Show or set the engine weights of a pool."""
        parts = scope["path"].removeprefix(POOLS).split("/")[1:]
        if len(parts) != 2 or parts[1] != "weights":
            raise ApiError(404, f"Use {POOLS}/POOL/weights.", code="not_found")
        pool, weights = parts[0], None
        try:
            token("pool", pool)
        except InvalidName as error:
            raise bad_request(f"{error}.") from error
        if scope["method"] != "GET":
            require_method("POST", scope["method"])
            async with self._bodies.read(scope, receive) as body:
                try:
                    weights = _weights.decode(body)
                except msgspec.DecodeError as error:
                    raise bad_request(
                        f'The body must be a JSON object of numbers by engine, such as {{"vllm": 3, "sglang": 1}}: {error}.'
                    ) from error
            _log.info("admin_weights", pool=pool, weights=weights, by=by)
        answer = await request_weights(self._ports, pool, WeightsRequest(weights, by))
        document = {"pool": pool, "engines": msgspec.to_builtins(answer.engines)}
        return _result(document, answer.reply)

    async def _command(self, worker: str, name: str, by: str, body: bytes) -> tuple[int, Any]:
        command = next((candidate for candidate in COMMANDS if candidate == name), None)
        if command is None:
            raise ApiError(
                404, f"Unknown command {name[:64]!r}. Commands: {', '.join(COMMANDS)}.", code="not_found"
            )
        try:
            arguments = _arguments.decode(body) if body.strip() else {}
        except msgspec.DecodeError as error:
            raise bad_request(f"The body must be a JSON object of arguments: {error}.") from error
        try:
            token("worker", worker)
        except InvalidName as error:
            raise bad_request(f"{error}.") from error
        _log.info("admin_command", worker=worker, command=command, by=by)
        reply = await send_command(
            self._ports, worker, ControlRequest(command, arguments, by), within_s=COMMAND_S_MAX
        )
        return _result({"worker": worker, "data": reply.data}, reply)


def _result(document: dict[str, Any], reply: ControlReply) -> tuple[int, Any]:
    """The status and the document of a response to a command; one that was refused says why."""
    if reply.status == 200:
        return 200, {**document, "detail": reply.detail}
    kind = KINDS.get(reply.status, "invalid_request_error" if reply.status < 500 else "server_error")
    error = ApiError(reply.status, reply.detail, kind=kind, code=kind)
    return reply.status, {**error.document(), **document}


def _find_worker(workers: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for entry in workers:
        if entry["worker"] == name:
            return entry
    names = ", ".join(entry["worker"] for entry in workers) or "none"
    raise ApiError(404, f"Unknown worker {name[:64]!r}. Workers: {names}.", code="not_found")


def _extra_headers(error: ApiError) -> Headers:
    headers: Headers = [*error.headers]
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headwater admin"'))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_s // 1)))
    return headers
