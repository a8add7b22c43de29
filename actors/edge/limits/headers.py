"""OpenAI's `x-ratelimit-*` response headers."""

from collections.abc import Sequence
from typing import Final

from headwater.actors.edge.limits.account import Account
from headwater.actors.edge.limits.token_bucket import TokenBucket
from headwater.actors.http.asgi import Headers

_MINUTE_S: Final = 60

_Names = tuple[bytes, bytes, bytes]
_REQUESTS: Final[_Names] = (
    b"x-ratelimit-limit-requests",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-reset-requests",
)
_TOKENS: Final[_Names] = (
    b"x-ratelimit-limit-tokens",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-tokens",
)


def rate_limit_headers(accounts: Sequence[Account], now_s: float) -> Headers:
    """Limit, remaining units and time until they are all there again: of the account that has least left of each."""
    requests = [account.requests for account in accounts if account.requests is not None]
    tokens = [account.tokens for account in accounts if account.tokens is not None]
    return [*_of_buckets(_REQUESTS, requests, now_s), *_of_buckets(_TOKENS, tokens, now_s)]


def _of_buckets(names: _Names, buckets: Sequence[TokenBucket], now_s: float) -> Headers:
    if not buckets:
        return []
    left, bucket = min(((one.left(now_s), one) for one in buckets), key=lambda found: found[0])
    return [
        (names[0], b"%d" % bucket.capacity),
        (names[1], b"%d" % left),
        (names[2], duration(bucket.reset_s(now_s)).encode()),
    ]


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `20ms`, `1.5s`, `6m0s`. Rounded up to milliseconds."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, _MINUTE_S * 1000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text
