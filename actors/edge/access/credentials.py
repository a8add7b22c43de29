"""The credential in a request's headers: `Authorization: Bearer …` or `x-api-key: …`. Never in the URL."""

from typing import Final

from headwater.actors.edge.access.refusals import NO_CREDENTIAL, unauthenticated
from headwater.actors.http.asgi import Headers

CREDENTIAL_BYTES_MAX: Final = 16 * 1024
"""Tokens of identity providers have hundreds of bytes, with many groups a few thousand."""


def credential_of(headers: Headers) -> bytes:
    """The one credential of a request. Raises `ApiError` 401 if there is none, or two that differ."""
    found = b""
    for name, value in headers:
        if name == b"x-api-key":
            given = value.strip()
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise unauthenticated("The authorization header must have the form `Bearer KEY`.")
            given = rest.strip()
        else:
            continue
        if not given:
            raise unauthenticated(NO_CREDENTIAL)
        # Clients of two APIs in one may send both headers; which one counts must not depend on their order.
        if found and given != found:
            raise unauthenticated("The request has several API keys that differ; send one.")
        found = given
    if not found:
        raise unauthenticated(NO_CREDENTIAL)
    if len(found) > CREDENTIAL_BYTES_MAX:
        raise unauthenticated(f"The API key is longer than {CREDENTIAL_BYTES_MAX} bytes.")
    return found
