"""Reads JSON bodies into msgspec types; errors name the field."""

import re
from typing import Any, Final

import msgspec

from headwater.actors.http.errors import ApiError, bad_request

_INVALID_VALUE: Final = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""msgspec repeats a value that is none of those allowed; errors do not repeat what a client sent."""


def decode_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Read a body. Raises `ApiError` 400 naming the field."""
    try:
        return decoder.decode(body)
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
