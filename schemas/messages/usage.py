"""What clients use of their rate limits, as each edge reports it to the others. Core NATS, never the log.

Totals instead of differences, so that a lost message is made good by the next one.
"""

import msgspec


class AccountUsage(msgspec.Struct, frozen=True, array_like=True):
    """One account: a holder of limits, for all models or for one, under a digest of both.

    `requests` and `tokens` count what the sender admitted since it opened the account, at `opened_ms` of its monotonic
    clock; `running` requests are in flight there. The `_used` fields are the sender's estimate of what is in use of the
    limits at all edges.
    """

    account: bytes
    opened_ms: int
    requests_per_minute: int
    tokens_per_minute: int
    requests: int
    tokens: int
    running: int
    requests_used: float
    tokens_used: float


class UsageReport(msgspec.Struct, frozen=True, array_like=True):
    """Accounts in use at one incarnation of an edge; `sent_ms` is its monotonic clock's time."""

    edge: str
    epoch: int
    sent_ms: int
    accounts: tuple[AccountUsage, ...]
