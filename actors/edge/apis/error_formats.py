"""Errors in the format of the API that a path belongs to."""

import math

from headwater.actors.edge.apis.anthropic import encoder as anthropic
from headwater.actors.edge.apis.anthropic.endpoints import REQUEST_PREFIX, request_id_header
from headwater.actors.http.asgi import Headers, Send, respond
from headwater.actors.http.errors import ApiError


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


async def respond_error(send: Send, path: str, error: ApiError, id_: str) -> int:
    """Send an error; returns its status. `id_` names the response where the format has a name for it."""
    headers = _headers_of(error)
    status, body = error.status, b""
    if is_anthropic(path):
        status, body = anthropic.status_of(error), anthropic.error_body(error, REQUEST_PREFIX + id_)
        headers.append(request_id_header(id_))
    await respond(send, status, body or error.body(), headers)
    return status


def _headers_of(error: ApiError) -> Headers:
    if error.retry_after_s <= 0:
        return [*error.headers]
    return [*error.headers, (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
