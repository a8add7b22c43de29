"""Errors in the format of Anthropic's API."""

from typing import Any, Final

import msgspec

from headwater.actors.http.errors import ApiError

MESSAGE_CHARACTERS_MAX: Final = 1_500
OVERLOADED: Final = 529
"""Anthropic's status for what others call 503; its clients retry both."""

KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_document(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}, "request_id"}`."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"type": kind, "message": str(error)[:MESSAGE_CHARACTERS_MAX]}
    return {"type": "error", "error": details, "request_id": request_id}


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    """The body of an error response."""
    return msgspec.json.encode(error_document(error, request_id))


def status_of(error: ApiError) -> int:
    """The status of an error response."""
    return OVERLOADED if error.status == 503 else error.status
