"""Checks of a regular expression before an engine compiles it to an automaton. Pure.

The engine needs a regular language, without look-around and back-references, whose counted repetitions expand to a
small automaton: `(a{1000}){1000}` is twelve bytes and a million states.
"""

import re
import warnings
from typing import Final

from headwater.actors.http.errors import ApiError, bad_request

BYTES_MAX: Final = 4_096
STATES_MAX: Final = 10_000
"""Characters of the expression with its counted repetitions expanded."""

_COUNTED: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_BEYOND: Final = re.compile(r"\(\?(?:=|!|<=|<!|P=|\()")
_GROUP_NAME: Final = re.compile(r"\(\?<(?=[A-Za-z_])")
_CATEGORY: Final = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])")


def check_regex(pattern: str, param: str) -> None:
    """Raises `ApiError` 400 naming `param` and what to change."""
    if not pattern:
        raise bad_request(f"{param} is empty; leave it out to allow any answer.", param=param)
    if len(pattern.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise bad_request(f"{param} is larger than {BYTES_MAX} bytes; shorten it.", param=param)
    # Syntax of engines that Python spells differently or lacks.
    plain = _CATEGORY.sub(r"\\w", _GROUP_NAME.sub("(?P<", pattern))
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(plain)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise bad_request(f"{param} is not a valid regular expression: {error}.", param=param) from error
    if _states(plain, param) > STATES_MAX:
        raise _too_large(param)


def _states(pattern: str, param: str) -> int:
    """Atoms of the expression with its counted repetitions expanded. It compiles, so brackets match."""
    groups: list[int] = []
    total = last = at = 0
    while at < len(pattern):
        here = pattern[at]
        counted = _COUNTED.match(pattern, at) if here == "{" else None
        if counted is not None and counted[0] not in ("{}", "{,}"):
            # One copy is counted already.
            times = max(int(digits[:9]) for digits in (counted[1] or "0", counted[2] or "0"))
            total += last * max(0, times - 1)
            last *= max(1, times)
            at = counted.end()
        elif here == "(":
            if _BEYOND.match(pattern, at):
                raise _not_regular(param, "look-around, references and conditions")
            groups.append(total)
            total = last = 0
            at += 1
        elif here == ")":
            last = total
            total += groups.pop()
            at += 1
        elif here == "[":
            at = _behind_class(pattern, at)
            total, last = total + 1, 1
        elif here == "\\":
            if pattern[at + 1] in "123456789":
                raise _not_regular(param, "references to groups")
            at += 2
            total, last = total + 1, 1
        else:
            at += 1
            if here not in "*+?|":
                total, last = total + 1, 1
        if total > STATES_MAX:
            raise _too_large(param)
    return total


def _behind_class(pattern: str, at: int) -> int:
    """Index after the character class that begins at `at`."""
    at += 2 if pattern[at + 1] == "^" else 1
    first = at
    while pattern[at] != "]" or at == first:
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _not_regular(param: str, what: str) -> ApiError:
    return bad_request(
        f"{param} uses {what}, which guided decoding does not support; remove it.", param=param
    )


def _too_large(param: str) -> ApiError:
    return bad_request(
        f"{param} has more than {STATES_MAX} characters once its repetitions are expanded:"
        " use smaller counts or *.",
        param=param,
    )
