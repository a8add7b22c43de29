"""What endpoints check before anything else: the method, and the body, read from JSON into msgspec types. Errors name the field."""

import re
from typing import Any, Final

import msgspec

from headwater.actors.http.errors import ApiError, bad_request, method_not_allowed
from headwater.actors.http.long_strings import ShortenedBody

_INVALID_VALUE: Final = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""msgspec repeats a value that is none of those allowed; errors do not repeat what a client sent."""


def require_method(wanted: str, method: str) -> None:
    """Raises a 405 for another method than the wanted one."""
    if method != wanted:
        raise method_not_allowed(wanted)


def decode_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Read a body. Raises `ApiError` 400 naming the field."""
    try:
        return body.decode_with(decoder) if isinstance(body, ShortenedBody) else decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}") from error


def invalid_field(error: msgspec.ValidationError) -> ApiError:
    """400 naming the field at fault."""
    message, _, where = str(error).partition(" - at `$")
    message = _INVALID_VALUE.sub(r"\1", message)
    param = where.rstrip("`").lstrip(".") or None
    return bad_request(f"{message}" + (f" (at {param})" if param else ""), param=param)
