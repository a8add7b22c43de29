"""Logits processors by name: only those that the worker was started with, each with arguments of its own. Pure."""

from typing import Any, Final

import msgspec

from headwater.actors.edge.errors import bad_request
from headwater.actors.edge.our_fields import is_ours, without_ours

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
        raise bad_request(f"{PARAM} is a list of names, or names with their arguments.", param=PARAM)
    found: Processors = {}
    for name, arguments in value.items():
        if name not in known or is_ours(name):
            served = ", ".join(known) or "none"
            raise bad_request(
                f"There is no logits processor {name[:64]!r} here. This model's: {served}.", param=PARAM
            )
        if not isinstance(arguments, dict | None):
            raise bad_request(f"{PARAM}.{name} is an object of arguments, or null.", param=f"{PARAM}.{name}")
        if not _plain(arguments, 0):
            raise bad_request(
                f"{PARAM}.{name} is nested deeper than {DEPTH_MAX}, or has a number beyond 64 bits.",
                param=f"{PARAM}.{name}",
            )
        found[name] = without_ours(arguments or {})
    if len(msgspec.json.encode(found)) > ARGUMENT_BYTES_MAX:
        raise bad_request(f"{PARAM} is larger than {ARGUMENT_BYTES_MAX} bytes.", param=PARAM)
    return found


def _plain(value: Any, depth: int) -> bool:
    """Can it be sent on?"""
    if depth > DEPTH_MAX:
        return False
    if isinstance(value, dict):
        return all(_plain(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return all(_plain(inner, depth + 1) for inner in value)
    return not isinstance(value, int) or value in INTEGERS
