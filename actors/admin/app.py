"""The admin HTTP API: the workers, and control commands. A plain ASGI application on a port of its own.

    GET  /admin/workers                       every worker: lease, state, role, load, LoRA adapters
    GET  /admin/workers/{worker}              one of them
    POST /admin/workers/{worker}/{command}    a control command; the body is a JSON object of its arguments
    GET  /live                                without a token: is the process up?

All paths but /live require `Authorization: Bearer TOKEN`. Every response is JSON; an error says what to do, and its
status is that of the command (`schemas.messages.control`). There is no CORS, so pages of other sites cannot call it.
"""

from typing import Any

import msgspec
import structlog

from headwater.actors.admin.tokens import TokenAuthenticator
from headwater.actors.http.asgi import ClientGone, Headers, Receive, Scope, Send, respond
from headwater.actors.http.body import Bodies
from headwater.actors.http.decoding import require_method
from headwater.actors.http.errors import ApiError, bad_request
from headwater.actors.http.limits import BodyLimits
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.control.client import list_workers, send_command
from headwater.schemas.messages.control import COMMANDS, ControlReply, ControlRequest
from headwater.schemas.names import InvalidName, token

BODY_BYTES_MAX = 64 * 1024
COMMAND_S_MAX = 900.0

KINDS = {404: "not_found", 409: "conflict", 501: "not_supported", 502: "engine_failed", 504: "timeout"}
PREFIX = "/admin/workers"

HEADERS: Headers = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

_arguments = msgspec.json.Decoder(dict[str, Any])

_log = structlog.get_logger("headwater.admin")


class AdminApp:
    """See the module."""

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

    async def _command(self, worker: str, name: str, by: str, body: bytes) -> tuple[int, Any]:
        command = next((known for known in COMMANDS if known == name), None)
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
        return _response(worker, reply)


def _response(worker: str, reply: ControlReply) -> tuple[int, Any]:
    if reply.status == 200:
        return 200, {"worker": worker, "detail": reply.detail, "data": reply.data}
    kind = KINDS.get(reply.status, "invalid_request_error" if reply.status < 500 else "server_error")
    error = ApiError(reply.status, reply.detail, kind=kind, code=kind)
    return reply.status, {**error.document(), "worker": worker, "data": reply.data}


def _find_worker(workers: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for one in workers:
        if one["worker"] == name:
            return one
    known = ", ".join(one["worker"] for one in workers) or "none"
    raise ApiError(404, f"Unknown worker {name[:64]!r}. Workers: {known}.", code="not_found")


def _extra_headers(error: ApiError) -> Headers:
    headers: Headers = [*error.headers]
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headwater admin"'))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_s // 1)))
    return headers
