"""OpenAI's `x-ratelimit-*` response headers."""

from collections.abc import Sequence
from typing import Final

from headwater.actors.edge.limits.account import Account
from headwater.actors.edge.limits.token_bucket import TokenBucket
from headwater.actors.http.asgi import Headers

_MINUTE_S: Final = 60


def rate_limit_headers(accounts: Sequence[Account], now_s: float) -> Headers:
    """Limit, remaining units and time until they are all there again: of the account that has least left of each."""
    headers: Headers = []
    for name, buckets in (
        (b"requests", [account.requests for account in accounts if account.requests is not None]),
        (b"tokens", [account.tokens for account in accounts if account.tokens is not None]),
    ):
        if buckets:
            headers += _of_bucket(name, min(buckets, key=lambda bucket: bucket.left(now_s)), now_s)
    return headers


def _of_bucket(name: bytes, bucket: TokenBucket, now_s: float) -> Headers:
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % bucket.capacity),
        (b"x-ratelimit-remaining-" + name, b"%d" % bucket.left(now_s)),
        (b"x-ratelimit-reset-" + name, duration(bucket.reset_s(now_s)).encode()),
    ]


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `20ms`, `1.5s`, `6m0s`. Rounded up to milliseconds."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, _MINUTE_S * 1000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text
