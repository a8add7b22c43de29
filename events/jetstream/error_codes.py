"""What a JetStream error code means for the caller. One place for every code that Headwater knows.

From the server's own list (`server/errors.json`, codes 10002 to 10227 at nats-server 2.15). Its HTTP-like `code` is
right for most: 400, 404 and 412 are final, everything else passes. The sets below are the exceptions. A code that is
not in the list, of a newer server, is retryable: who gives up on an error that passes stops for good.
"""

from typing import Final, Literal

STREAM_NOT_FOUND: Final = 10059
MESSAGE_NOT_FOUND: Final = 10037
WRONG_LAST_SEQUENCE: Final = 10071
SUBJECT_BUSY: Final = 10164
STREAM_NAME_IN_USE: Final = 10058
INVALID_JSON: Final = 10025
ALREADY_THERE: Final = 10201
"""A message id of an atomic batch is known: an earlier try got through."""

NEWEST_KNOWN: Final = 10227

FULL: Final = frozenset(
    {
        10002,  # account limits
        10023,  # insufficient resources
        10028,  # memory limit
        10047,  # storage limit
        10053,  # stream limits
        10077,  # the store failed: no space, an I/O error, or a store frozen by one
    }
)
"""The store has no room. Retryable once an operator made room."""

PASSES: Final = frozenset(
    {
        10005,  # no peers: servers are away
        10013, 10014, 10026, 10105, 10148, 10149, 10225,  # a consumer of an earlier try, or one that went away
        10040, 10044, 10124, 10129, 10202, 10226,  # membership or a move under way
        10043,  # a sequence that is not there yet
        10176, 10208,  # a batch whose first part went with its leader
    }
)  # fmt: skip
"""Coded as the client's mistake (4xx), but the same call may succeed later. Conflicts (`WRONG_LAST_SEQUENCE`,
`SUBJECT_BUSY`) are not here: they are answers, which the caller of a conditional write acts on."""

STAYS: Final = frozenset({10006, 10010, 10036, 10052, 10069, 10074, 10117})
"""Coded as the server's failure (5xx), but the same call fails again: configurations that it cannot have."""

Meaning = Literal["missing", "full", "retryable", "final"]


def meaning_of(err_code: int, code: int) -> Meaning:
    """What to do about an error answer with these two codes."""
    if err_code == STREAM_NOT_FOUND:
        return "missing"
    if err_code in FULL:
        return "full"
    if err_code in STAYS:
        return "final"
    if err_code in PASSES or not 0 < err_code <= NEWEST_KNOWN:
        return "retryable"
    return "final" if code in (400, 404, 412) else "retryable"
