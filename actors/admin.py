"""The admin's HTTP surface: who the workers are, and control commands. A raw ASGI application of its own port.

    GET  /admin/workers                       every worker: lease, state, role, load, adapters
    GET  /admin/workers/{worker}              one of them
    POST /admin/workers/{worker}/{command}    a control command; the body is a JSON object of its arguments
    GET  /live                                without a token: the process serves

Everything else needs `Authorization: Bearer TOKEN`. Every answer is JSON, an error says what to do, and its status
is the command's own (`schemas.control`). There is no CORS, so no other site's page can ask from a browser.
"""

from typing import Any

import msgspec
import structlog

from headwater.actors.admin_tokens import LogIns
from headwater.actors.control_client import control, roster
from headwater.actors.edge.body import Bodies
from headwater.actors.edge.errors import ApiError, bad_request
from headwater.actors.edge.http import ClientGone, Headers, Receive, Scope, Send, respond
from headwater.actors.edge.limits import BodyLimits
from headwater.actors.world import World
from headwater.schemas.control import COMMANDS, ControlReply, ControlRequest
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

    def __init__(self, world: World, log_ins: LogIns) -> None:
        self._world = world
        self._log_ins = log_ins
        self._bodies = Bodies(BodyLimits(BODY_BYTES_MAX))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Nothing escapes."""
        if scope["type"] != "http":
            return
        try:
            status, document = await self._route(scope, receive)
            await respond(send, status, msgspec.json.encode(document), HEADERS)
        except ApiError as error:
            await respond(send, error.status, error.body(), [*HEADERS, *_extra(error)])
        except ClientGone:
            pass
        except Exception:
            _log.exception("admin_request_failed", path=scope["path"])
            failure = ApiError(500, "The admin failed; its log says why.", kind="server_error")
            await respond(send, 500, failure.body(), HEADERS)

    async def _route(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        path, method = scope["path"], scope["method"]
        if path == "/live":
            return 200, {"status": "live"}
        by = self._log_ins.admit(scope)
        if path != PREFIX and not path.startswith(PREFIX + "/"):
            raise ApiError(404, f"There is nothing at {path[:200]}: use {PREFIX}.", code="not_found")
        parts = [part for part in path.removeprefix(PREFIX).split("/") if part]
        if len(parts) <= 1:
            _only("GET", method)
            workers = await roster(self._world, by)
            if not parts:
                return 200, {"workers": workers}
            return 200, _found(workers, parts[0])
        if len(parts) == 2:
            _only("POST", method)
            async with self._bodies.read(scope, receive) as body:
                return await self._command(parts[0], parts[1], by, body)
        raise ApiError(404, f"Use {PREFIX}/WORKER/COMMAND.", code="not_found")

    async def _command(self, worker: str, name: str, by: str, body: bytes) -> tuple[int, Any]:
        command = next((known for known in COMMANDS if known == name), None)
        if command is None:
            raise ApiError(
                404, f"There is no command {name[:64]!r}; known are {', '.join(COMMANDS)}.", code="not_found"
            )
        try:
            arguments = _arguments.decode(body) if body.strip() else {}
        except msgspec.DecodeError as error:
            raise bad_request(f"The body is no JSON object of arguments: {error}.") from error
        try:
            token("worker", worker)
        except InvalidName as error:
            raise bad_request(f"{error}.") from error
        _log.info("admin_command", worker=worker, command=command, by=by)
        reply = await control(
            self._world, worker, ControlRequest(command, arguments, by), within_s=COMMAND_S_MAX
        )
        return _answer(worker, reply)


def _answer(worker: str, reply: ControlReply) -> tuple[int, Any]:
    if reply.status == 200:
        return 200, {"worker": worker, "detail": reply.detail, "data": reply.data}
    kind = KINDS.get(reply.status, "invalid_request_error" if reply.status < 500 else "server_error")
    error = ApiError(reply.status, reply.detail, kind=kind, code=kind)
    return reply.status, {**error.document(), "worker": worker, "data": reply.data}


def _found(workers: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for one in workers:
        if one["worker"] == name:
            return one
    known = ", ".join(one["worker"] for one in workers) or "none"
    raise ApiError(404, f"There is no worker {name[:64]!r}. There are: {known}.", code="not_found")


def _only(wanted: str, method: str) -> None:
    if method != wanted:
        raise ApiError(405, f"Use {wanted} here.", code="method_not_allowed")


def _extra(error: ApiError) -> Headers:
    headers: Headers = []
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headwater admin"'))
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_s // 1)))
    return headers
