"""Unique names of requests: 24 hex digits, the first 8 of which are the Unix time in seconds at which the name was made.

So a request is found in a log by its name alone, without reading the whole log.
"""

import re
import secrets
from collections.abc import Callable
from itertools import count
from typing import Final

SECOND_NS: Final = 1_000_000_000

ID_S_MIN: Final = 1_704_067_200
"""2024-01-01: no name was made before."""

AHEAD_S_MAX: Final = 86_400
"""How far the clock of the machine that made a name may be ahead of the reader's."""

_ID: Final = re.compile(r"(?<![0-9a-zA-Z])([0-9a-f]{8})[0-9a-f]{16}(?![0-9a-zA-Z])")

_ATTEMPT: Final = re.compile(r"-\d{1,9}-\d{1,9}(?:-e\d+-\d+)?$")


def unique_ids(wall_ns: Callable[[], int]) -> Callable[[], str]:
    """Ids of 24 hex digits: the time in seconds (`wall_ns` returns nanoseconds since the Unix epoch), 8 digits that are random per process, and a counter.

    Random digits are drawn once: asking the system for each id costs 4 % of an edge. The time is formatted once per second. The
    counter, which begins at random too, never repeats within a second, also when the clock goes back.
    """
    process, number = secrets.token_hex(4), count(secrets.randbelow(1 << 31)).__next__
    began_ns = ends_ns = 0
    prefix = ""

    def make() -> str:
        nonlocal began_ns, ends_ns, prefix
        now_ns = wall_ns()
        if not began_ns <= now_ns < ends_ns:
            began_ns = now_ns - now_ns % SECOND_NS
            ends_ns = began_ns + SECOND_NS
            prefix = f"{began_ns // SECOND_NS & 0xFFFFFFFF:08x}{process}"
        return f"{prefix}{number() & 0xFFFFFFFF:08x}"

    return make


def time_of(name: str, now_ns: int) -> int | None:
    """When the id in a request's name was made, in nanoseconds since the Unix epoch, to the second.

    None for a name without an id of this form, and where the time cannot be one: it is before 2024 or after `now_ns`.
    """
    found = _ID.search(name)
    if found is None:
        return None
    seconds = int(found[1], 16)
    if not ID_S_MIN <= seconds <= now_ns // SECOND_NS + AHEAD_S_MAX:
        return None
    return seconds * SECOND_NS


def request_of(attempt: str) -> str:
    """The name of the request in that of an attempt, `REQUEST-CHOICE-NUMBER`, or of its encode leg, `…-eITEM-NUMBER`."""
    return _ATTEMPT.sub("", attempt)
