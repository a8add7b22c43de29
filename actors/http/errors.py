"""HTTP errors in OpenAI's format, and pages of lists. Invalid input of a client never results in a 5xx."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from headwater.actors.http.asgi import Headers
from headwater.schemas.routing import RouteRefused

MESSAGE_BYTES_MAX: Final = 1_500
PARAM_BYTES_MAX: Final = 200
"""Sizes as JSON: with the rest of the error object, a response has at most 2 KB."""

NO_RETRY: Final[Headers] = [(b"x-should-retry", b"false")]
"""OpenAI's and Anthropic's clients retry 429 and 5xx unless this header forbids it."""

ENDED_WORKERS: Final = "request_ended_workers"
"""Code of the error for a request that workers died of."""


class ApiError(Exception):
    """A response with an error object, and more `headers`. `retry_after_s` becomes the Retry-After header.

    Message and `param` are cut to fit: they may name what the client sent.
    `logged`: what logs and the request log have instead of the message, where that may repeat a part of the request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
        headers: Headers | None = None,
        logged: str | None = None,
    ) -> None:
        message = cut(message, MESSAGE_BYTES_MAX)
        super().__init__(message)
        self.status = status
        self.logged = message if logged is None else logged
        self.kind = kind
        self.param = cut(param, PARAM_BYTES_MAX) if param else param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = headers or []

    def body(self) -> bytes:
        """The response body."""
        return msgspec.json.encode(self.document())

    def document(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def cut(text: str, bytes_max: int) -> str:
    """The text, or as much of its beginning as takes `bytes_max` bytes as JSON. Lone surrogates become question marks."""
    try:
        size = len(msgspec.json.encode(text[:bytes_max]))
    except UnicodeEncodeError:
        return cut(text[:bytes_max].encode("utf-8", "replace").decode(), bytes_max)
    if size <= bytes_max and len(text) <= bytes_max:
        return text
    length = min(len(text), bytes_max)
    while len(msgspec.json.encode(text[:length] + "…")) > bytes_max:
        length = length * 9 // 10
    return text[:length] + "…"


def bad_request(
    message: str, *, param: str | None = None, code: str | None = None, logged: str | None = None
) -> ApiError:
    """400: the request is invalid; a retry cannot succeed."""
    return ApiError(400, message, param=param, code=code, logged=logged)


def unauthenticated(message: str, code: str = "invalid_api_key") -> ApiError:
    """401: there is no credential, or it is not valid."""
    headers: Headers = [(b"www-authenticate", b"Bearer")]
    return ApiError(401, message, kind="authentication_error", code=code, headers=headers)


def forbidden(message: str, *, param: str | None = None, code: str = "insufficient_scope") -> ApiError:
    """403: the credential is valid, but does not permit this."""
    return ApiError(403, message, kind="permission_error", param=param, code=code)


def bad_field(param: str, says: str, *, code: str | None = None) -> ApiError:
    """400: a field of the request is invalid. Its name, and then what is wrong with it, are the message."""
    return bad_request(f"{param} {says}", param=param, code=code)


def method_not_allowed(*methods: str) -> ApiError:
    """405: the path exists, for these methods."""
    allow = ", ".join(methods).encode()
    message = f"Use {' or '.join(methods)} here."
    return ApiError(405, message, code="method_not_allowed", headers=[(b"allow", allow)])


def rejected(reason: str, param: str) -> ApiError:
    """400: an engine rejected the request; every other one would too."""
    return bad_request(
        f"The engine rejected the request: {reason}",
        param=param or None,
        code="invalid_value",
        logged=f"The engine rejected the request{f' for {param}' if param else ''}.",
    )


def no_model(name: str, available: list[str]) -> ApiError:
    """404: the model does not exist here."""
    served = ", ".join(available) or "none yet: no worker has joined"
    return ApiError(
        404,
        f"The model {name!r} is not served here. Served: {served}.",
        param="model",
        code="model_not_found",
    )


def overloaded(message: str, retry_after_s: float = 1.0) -> ApiError:
    """503: no worker can take the request at the moment."""
    return ApiError(503, message, kind="server_error", code="overloaded", retry_after_s=retry_after_s)


def refused_by_router(refused: RouteRefused) -> ApiError:
    """429 or 503: a router refused the request, with the time after which to retry. 400: no retry can succeed."""
    if refused.status == 400:
        return bad_request(f"{refused.reason}.")
    kind = "rate_limit_error" if refused.status == 429 else "server_error"
    return ApiError(
        refused.status,
        f"The request was refused: {refused.reason}.",
        kind=kind,
        code=refused.code or "overloaded",
        retry_after_s=refused.retry_after_s,
    )


def ended_workers(count: int, reason: str) -> ApiError:
    """502: so many workers died while they ran the request that it counts as the cause; a retry would end more."""
    return ApiError(
        502,
        f"{count} workers failed while they ran this request, so it is not tried again; last reason: {reason}.",
        kind="server_error",
        code=ENDED_WORKERS,
        headers=NO_RETRY,
    )


def migrated_too_often(count: int, reason: str) -> ApiError:
    """502: this many migrations are the limit."""
    if not count:
        return upstream_failed(
            f"Requests of this model do not migrate (--migration-limit 0), and its worker failed: {reason}."
        )
    return upstream_failed(f"The request was migrated {count} times; last reason: {reason}.")


def upstream_failed(message: str) -> ApiError:
    """502: workers failed and the request could not be migrated."""
    return ApiError(502, message, kind="server_error", code="worker_failed")


def not_migrated(origin: str, error: ApiError, *, has_begun: bool) -> ApiError:
    """No worker took what a request moved away from `origin`.

    As long as the client has nothing of the answer, `error` says when to try again; else 502.
    """
    message = f"{origin}: {error}"
    if has_begun or not error.retry_after_s:
        return upstream_failed(message)
    return ApiError(
        error.status, message, kind=error.kind, code=error.code, retry_after_s=error.retry_after_s
    )


# Pages of lists: `after`, `limit` and `order`.

LIMIT_DEFAULT: Final = 20
LIMIT_MAX: Final = 100


class PageRequest(NamedTuple):
    """The requested page of a list. `after` is the id of the last item that the client has."""

    after: str = ""
    limit: int = LIMIT_DEFAULT
    descending: bool = True


def page_request(query: bytes) -> PageRequest:
    """The page that a query string asks for. Raises `ApiError` 400."""
    parameters = dict(parse_qsl(query.decode("latin-1")))
    limit, order = parameters.get("limit", str(LIMIT_DEFAULT)), parameters.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= LIMIT_MAX):
        raise bad_request(f"limit must be from 1 to {LIMIT_MAX}.", param="limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", param="order")
    return PageRequest(parameters.get("after", ""), int(limit), order == "desc")


def page_of(items: Sequence[dict[str, Any]], request: PageRequest) -> dict[str, Any]:
    """One page of items, whose order is the oldest first. Raises `ApiError` 400 for an unknown `after`."""
    ordered = list(reversed(items)) if request.descending else list(items)
    if request.after:
        ids = [item["id"] for item in ordered]
        if request.after not in ids:
            raise bad_request("after is not the id of an item of this list.", param="after")
        ordered = ordered[ids.index(request.after) + 1 :]
    page = ordered[: request.limit]
    return {
        "object": "list",
        "data": page,
        # Clients require strings.
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > len(page),
    }
