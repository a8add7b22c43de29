"""Errors a client sees, in OpenAI's shape. Nothing a client sends may end as a 5xx."""

from typing import Any

import msgspec

from headwater.schemas.route import RouteRefused


class ApiError(Exception):
    """An answer with an error object. `retry_after_s` becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The response body."""
        return msgspec.json.encode(self.document())

    def document(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": str(self)[:2000],
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never work as it is."""
    return ApiError(400, message, param=param, code=code)


def rejected(reason: str, param: str) -> ApiError:
    """400: an engine rejects the request; no other would take it."""
    return bad_request(f"The engine rejects the request: {reason}", param=param or None, code="invalid_value")


def no_model(name: str, known: list[str]) -> ApiError:
    """404: the model is not served here."""
    served = ", ".join(known) or "none yet: no worker has joined"
    return ApiError(
        404,
        f"The model {name!r} is not served here. Served: {served}.",
        param="model",
        code="model_not_found",
    )


def overloaded(message: str, retry_after_s: float = 1.0) -> ApiError:
    """503: no worker can take the request now."""
    return ApiError(503, message, kind="server_error", code="overloaded", retry_after_s=retry_after_s)


def refused_by_router(refused: RouteRefused) -> ApiError:
    """429 or 503: a router refuses the request for good, and says when to come again. 400: it can never work."""
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


def upstream_failed(message: str) -> ApiError:
    """502: workers failed under the request and it could not go on elsewhere."""
    return ApiError(502, message, kind="server_error", code="worker_failed")
