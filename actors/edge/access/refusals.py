"""Errors of authentication and authorization. No message repeats any part of a credential."""

from typing import Final

from headwater.actors.http.asgi import Headers
from headwater.actors.http.errors import ApiError

NO_CREDENTIAL: Final = (
    "No API key was given. Send one in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
)
INVALID_KEY: Final = "The API key is not valid: it is unknown, revoked or expired."


def unauthenticated(message: str, code: str = "invalid_api_key") -> ApiError:
    """401: there is no credential, or it is not valid."""
    headers: Headers = [(b"www-authenticate", b"Bearer")]
    return ApiError(401, message, kind="authentication_error", code=code, headers=headers)


def forbidden(message: str, *, param: str | None = None, code: str = "insufficient_scope") -> ApiError:
    """403: the credential is valid, but does not permit this."""
    return ApiError(403, message, kind="permission_error", param=param, code=code)
