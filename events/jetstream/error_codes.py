"""What a JetStream error code means for the caller: which errors are retryable.

From the server's list (`server/errors.json`, codes 10002 to 10227 at nats-server 2.15). Its HTTP-like `code` is right for
most: 400, 404 and 412 are permanent, everything else is retryable. The sets below are the exceptions. An unknown code, of
a newer server, is retryable: treating a temporary error as permanent would stop the process.
"""

from typing import Final, Literal

STREAM_NOT_FOUND: Final = 10059
MESSAGE_NOT_FOUND: Final = 10037
WRONG_LAST_SEQUENCE: Final = 10071
SUBJECT_BUSY: Final = 10164
STREAM_NAME_IN_USE: Final = 10058
INVALID_JSON: Final = 10025
ALREADY_THERE: Final = 10201
"""A message id of an atomic batch is a duplicate: an earlier attempt was stored."""

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
"""The store is full. Retryable once an operator freed space."""

PASSES: Final = frozenset(
    {
        10005,  # no peers: servers are offline
        10013, 10014, 10026, 10105, 10148, 10149, 10225,  # a consumer of an earlier attempt, or one that was removed
        10040, 10044, 10124, 10129, 10202, 10226,  # membership or a move under way
        10043,  # a sequence that does not exist yet
        10176, 10208,  # a batch whose first part was lost with its leader
    }
)  # fmt: skip
"""Status 4xx, but the same call may succeed later. Conflicts (`WRONG_LAST_SEQUENCE`, `SUBJECT_BUSY`) are not
included: they are results that the caller of a conditional write handles."""

STAYS: Final = frozenset({10006, 10010, 10036, 10052, 10069, 10074, 10117})
"""Status 5xx, but the same call fails again: invalid configurations."""

Meaning = Literal["missing", "full", "retryable", "final"]


def meaning_of(err_code: int, code: int) -> Meaning:
    """How to handle an error reply with these two codes."""
    if err_code == STREAM_NOT_FOUND:
        return "missing"
    if err_code in FULL:
        return "full"
    if err_code in STAYS:
        return "final"
    if err_code in PASSES or not 0 < err_code <= NEWEST_KNOWN:
        return "retryable"
    return "final" if code in (400, 404, 412) else "retryable"
