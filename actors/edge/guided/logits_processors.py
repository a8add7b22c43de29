"""Logits processors by name: only those that the worker was started with, each with its arguments. Pure."""

from typing import Any, Final

import msgspec

from headwater.actors.edge.request.fields import is_reserved, without_reserved
from headwater.actors.http.errors import bad_request

PARAM: Final = "logits_processors"
ARGUMENT_BYTES_MAX: Final = 16 * 1024
DEPTH_MAX: Final = 8
INTEGERS: Final = range(-(2**63), 2**64)

Processors = dict[str, dict[str, Any]]


def processors_of(value: Any, known: tuple[str, ...]) -> Processors:
    """`{name: arguments}` or a list of names, checked against the model's. Raises `ApiError` 400.

    Arguments are copied to the engine as they are, without the fields that only we may set.
    """
    if value is None or value == [] or value == {}:
        return {}
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        value = dict.fromkeys(value)
    if not isinstance(value, dict):
        raise bad_request(
            f"{PARAM} must be a list of names, or an object of names with their arguments.", param=PARAM
        )
    found: Processors = {}
    for name, arguments in value.items():
        if name not in known or is_reserved(name):
            served = ", ".join(known) or "none"
            raise bad_request(
                f"This model has no logits processor {name[:64]!r}. Available: {served}.", param=PARAM
            )
        if not isinstance(arguments, dict | None):
            raise bad_request(
                f"{PARAM}.{name} must be an object of arguments, or null.", param=f"{PARAM}.{name}"
            )
        if not _plain(arguments, 0):
            raise bad_request(
                f"{PARAM}.{name} is nested deeper than {DEPTH_MAX}, or has a number beyond 64 bits.",
                param=f"{PARAM}.{name}",
            )
        found[name] = without_reserved(arguments or {})
    if len(msgspec.json.encode(found)) > ARGUMENT_BYTES_MAX:
        raise bad_request(f"{PARAM} is larger than {ARGUMENT_BYTES_MAX} bytes.", param=PARAM)
    return found


def _plain(value: Any, depth: int) -> bool:
    """Whether msgpack can encode it."""
    if depth > DEPTH_MAX:
        return False
    if isinstance(value, dict):
        return all(_plain(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return all(_plain(inner, depth + 1) for inner in value)
    return not isinstance(value, int) or value in INTEGERS
