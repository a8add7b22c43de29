"""Rate limits of one edge: its accounts, what one request takes from its account, the time limit of requests, and use that edges share.

    quota = limiter.quota(holder)               before the body is read
    quota.enter(model)                          counts the request; raises 429
    quota.reserve(prompt tokens, answer tokens) raises 429
    quota.settle(tokens)                        what it used in the end, instead of what was reserved
    quota.leave()                               always

Memory is bounded: an unused account is forgotten as soon as that changes nothing, and holders beyond
`ACCOUNTS_MAX` share one account.

Sharing over core NATS: each edge publishes its own use, and charges what the others publish.

Subjects
    hw.<ns>.usage.<edge>, published every `SHARE_S` while accounts of this edge change, else every `IDLE_S`
On loss of NATS
    each edge enforces the whole limit on its own clients; afterwards it charges what the others used in the meantime, up to one
    minute's limit
Error
    n edges that do not yet know of each other's use admit at most n times what is left, for `SHARE_S` and the time of a
    message; what was admitted too much is debt, and nothing is admitted until it has drained. See docs/guides/limits.md.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import msgspec
import structlog

from headwater.actors import metrics
from headwater.actors.edge.admit.account import (
    FORGET_S,
    STALE_S,
    Account,
    LimitHolder,
    TokenBucket,
    account_key,
)
from headwater.actors.edge.settings import RateLimits
from headwater.actors.http.asgi import Headers
from headwater.actors.http.errors import NO_RETRY, ApiError
from headwater.actors.runtime.ports import Bus, BusError, Message, Subscription
from headwater.schemas import subjects
from headwater.schemas.clock import Clock, SystemClock
from headwater.schemas.inference import AccountUsage, UsageReport

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
    remaining, bucket = min(
        ((candidate.left(now_s), candidate) for candidate in buckets), key=lambda choice: choice[0]
    )
    return [
        (names[0], b"%d" % bucket.capacity),
        (names[1], b"%d" % remaining),
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


ACCOUNTS_MAX: Final = 50_000
SWEPT_A_TURN: Final = 500

DEFAULT_ANSWER_TOKENS: Final = 1_024
"""Reserved for each answer of a request that sets no limit: reserving the whole context would admit one at a time."""

RETRY_RUNNING_S: Final = 1.0
"""Retry-After of a request beyond the limit on concurrent ones: when one of them ends is not known."""

Limit = Literal["requests", "tokens", "concurrency"]

_log = structlog.get_logger("headwater.limits")


class RateLimiter:
    """The accounts of one edge. `changed` holds the accounts that other edges have to hear of."""

    def __init__(self, clock: Clock, accounts_max: int = ACCOUNTS_MAX) -> None:
        self.clock = clock
        self.changed: dict[bytes, Account] = {}
        self._accounts: dict[bytes, Account] = {}
        self._accounts_max = accounts_max
        self._sweep: list[bytes] = []
        self._full = False

    def __len__(self) -> int:
        return len(self._accounts)

    def quota(self, holder: LimitHolder) -> "RequestQuota":
        """Return what one request of this holder may take."""
        return RequestQuota(self, holder)

    def account(self, key: bytes, limits: RateLimits) -> Account:
        """The account of this name, opened if there is room for it, with these limits."""
        now_s = self.clock.monotonic_s()
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= self._accounts_max:
                key = self._shared_key()
                account = self._accounts.get(key)
            if account is None:
                account = self._accounts[key] = Account(key, limits, now_s)
        account.set_limits(limits, now_s)
        return account

    def reported(self, key: bytes, limits: RateLimits) -> Account | None:
        """The account that another edge reports; opened if there is room. Its limits here, where known, are kept."""
        account = self._accounts.get(key)
        if account is None and len(self._accounts) < self._accounts_max:
            account = self._accounts[key] = Account(key, limits, self.clock.monotonic_s())
        return account

    def find(self, key: bytes) -> Account | None:
        """The account of this name, None where it was never opened or is forgotten."""
        return self._accounts.get(key)

    def sweep(self) -> None:
        """Forget some of the accounts that are idle; called again and again, it passes over all of them."""
        now_s = self.clock.monotonic_s()
        if not self._sweep:
            self._sweep = list(self._accounts)
        for _ in range(min(SWEPT_A_TURN, len(self._sweep))):
            key = self._sweep.pop()
            account = self._accounts.get(key)
            if account is not None and account.is_idle(now_s):
                del self._accounts[key]
        metrics.LIMIT_ACCOUNTS.set(len(self._accounts))

    def active(self) -> Iterable[Account]:
        """Accounts with requests in flight at this edge."""
        return (account for account in self._accounts.values() if account.running)

    def _shared_key(self) -> bytes:
        if not self._full:
            self._full = True
            _log.warning(
                "limit_accounts_full", accounts=self._accounts_max, effect="further holders share one"
            )
        return account_key("", "")


class RequestQuota:
    """What one request takes from its holder's accounts: that of all models, and that of its model.

    Without limits every call does nothing.
    """

    __slots__ = ("_accounts", "_entered", "_holder", "_limited", "_limiter", "_reserved", "_settled")

    def __init__(self, limiter: RateLimiter, holder: LimitHolder) -> None:
        self._limiter = limiter
        self._holder = holder
        self._limited = holder.limited
        self._accounts: list[Account] = []
        self._entered = False
        self._reserved = 0
        self._settled = False

    def context(self, model: str, tokens: int) -> int:
        """The longest context of this holder for a model, in tokens: the model's own, or less."""
        if not self._limited:
            return tokens
        return min(
            [tokens, *(limits.context_tokens or tokens for _, limits in self._holder.limits_of(model))]
        )

    def enter(self, model: str) -> None:
        """Count the request, and as one in flight. Raises `ApiError` 429."""
        limiter, holder = self._limiter, self._holder
        if self._accounts or not self._limited:
            return
        self._accounts = [
            limiter.account(account_key(holder.name, scope), limits)
            for scope, limits in holder.limits_of(model)
            if limits.any_rate
        ]
        now_s = limiter.clock.monotonic_s()
        for account in self._accounts:
            most = account.limits.concurrent_requests
            if most and account.running_everywhere(now_s) >= most:
                raise _reached("concurrency", f"{most} requests in flight", RETRY_RUNNING_S)
        wait_s, rate = self._wait("requests", 1, now_s)
        if wait_s:
            raise _reached("requests", f"{rate} requests per minute", wait_s)
        self._entered = True
        self._use(requests=1, running=1)

    def reserve(self, prompt_tokens: int, answer_tokens: int | None, answers: int = 1) -> None:
        """Reserve tokens: those of the prompts and of each answer, None if the request sets no limit.

        Raises `ApiError` 429.
        """
        if not self._accounts:
            return
        rates = [account.tokens.capacity for account in self._accounts if account.tokens is not None]
        if not rates:
            return
        if answer_tokens is None:
            # What it generates beyond that is charged at the end.
            needed_tokens = max(prompt_tokens, min(prompt_tokens + DEFAULT_ANSWER_TOKENS * answers, *rates))
        else:
            needed_tokens = prompt_tokens + answer_tokens * answers
        wait_s, rate = self._wait("tokens", needed_tokens, self._limiter.clock.monotonic_s())
        if math.isinf(wait_s):
            raise _too_large(needed_tokens, rate)
        if wait_s:
            raise _reached(
                "tokens", f"{rate} tokens per minute; this request may use {needed_tokens}", wait_s
            )
        self._reserved = needed_tokens
        self._use(tokens=needed_tokens)

    def settle(self, tokens: int) -> None:
        """The request used `tokens` in the end. Never called, it used none."""
        self._settled = True
        if self._reserved:
            self._use(tokens=tokens - self._reserved)
            self._reserved = 0

    def leave(self) -> None:
        """The request ended. A second call does nothing."""
        if not self._entered:
            return
        self._entered = False
        if not self._settled:
            self.settle(0)
        self._use(running=-1)

    def headers(self) -> Headers:
        """`x-ratelimit-*`: of the account with the least left."""
        if not self._accounts:
            return []
        return rate_limit_headers(self._accounts, self._limiter.clock.monotonic_s())

    def _wait(self, resource: Literal["requests", "tokens"], amount: int, now_s: float) -> tuple[float, int]:
        """The longest wait of all accounts, and the limit that demands it."""
        buckets = (
            account.requests if resource == "requests" else account.tokens for account in self._accounts
        )
        waits = [(bucket.wait_s(amount, now_s), bucket.capacity) for bucket in buckets if bucket is not None]
        return max(waits, default=(0.0, 0))

    def _use(self, *, requests: int = 0, tokens: int = 0, running: int = 0) -> None:
        now_s = self._limiter.clock.monotonic_s()
        for account in self._accounts:
            account.use(now_s, requests=requests, tokens=tokens, running=running)
            self._limiter.changed[account.key] = account


NO_QUOTA: Final = RequestQuota(RateLimiter(SystemClock()), LimitHolder(""))
"""The quota of a holder without limits."""


def _reached(limit: Limit, description: str, wait_s: float) -> ApiError:
    metrics.RATE_LIMITED.labels(limit).inc()
    return ApiError(
        429,
        f"Rate limit reached: {description}. Retry in {wait_s:.3g} s.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def _too_large(needed_tokens: int, limit: int) -> ApiError:
    metrics.RATE_LIMITED.labels("request_too_large").inc()
    return ApiError(
        429,
        f"The request is too large: it may use {needed_tokens} tokens, and the limit is {limit} per minute. "
        "Shorten the prompt or lower max_tokens; a retry cannot succeed.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers=NO_RETRY,
    )


# The time limit of requests.


class TimeLimit:
    """A block that calls `abort` with the error for the client once it takes longer than `seconds`; 0: no limit."""

    __slots__ = ("_abort", "_seconds", "_timer")

    def __init__(self, seconds: float, abort: Callable[[ApiError], None]) -> None:
        self._seconds = seconds
        self._abort = abort
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._seconds:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self._abort(time_limit_reached(self._seconds))


def time_limit_reached(seconds: float) -> ApiError:
    """504: the request took too long. A client that retried it would only make the same work again."""
    return ApiError(
        504,
        f"The request reached this server's time limit of {seconds:g} s. Lower max_tokens, or split the request.",
        kind="server_error",
        code="request_timeout",
        headers=NO_RETRY,
    )


# Use that edges share.

SHARE_S: Final = 0.15
IDLE_S: Final = 1.0

REPEAT_S: Final = 2.0
"""A changed account is reported for this long: a lost message is made good by the next one."""

REPORTED_MAX: Final = 1_000
"""Accounts in one message, about 60 KB; the rest follow in the next one."""

PEERS_MAX: Final = 256

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(UsageReport)


class PeerEdge(msgspec.Struct):
    """Another edge: its incarnation, and since when, on its clock, its reports have come without a pause."""

    epoch: int
    whole_since_ms: int
    heard_s: float


class UsageReports:
    """What is sent and what is received, without the sending. Pure but for the limiter's clock."""

    def __init__(self, limiter: RateLimiter, edge: str, epoch: int) -> None:
        self._limiter = limiter
        self._edge = edge
        self._epoch = epoch
        self._until: dict[bytes, float] = {}
        self._sent_s = float("-inf")
        self._peers: dict[str, PeerEdge] = {}

    def next_report(self) -> bytes | None:
        """The message to publish now, None for none."""
        limiter, now_s = self._limiter, self._limiter.clock.monotonic_s()
        fresh, limiter.changed = limiter.changed, {}
        for key in fresh:
            # At the end: what waited longest is reported first.
            self._until.pop(key, None)
            self._until[key] = now_s + REPEAT_S
        idle = now_s - self._sent_s >= IDLE_S
        if idle:
            for running in limiter.active():
                self._until.setdefault(running.key, now_s)
        if not self._until and not idle:
            return None
        accounts: list[AccountUsage] = []
        for key in list(self._until)[:REPORTED_MAX]:
            until_s = self._until.pop(key)
            account = limiter.find(key)
            if account is None:
                continue
            accounts.append(account.usage(now_s))
            if until_s > now_s:
                self._until[key] = until_s
        self._sent_s = now_s
        report = UsageReport(self._edge, self._epoch, round(now_s * 1000), tuple(accounts))
        return _encoder.encode(report)

    def add(self, data: bytes) -> None:
        """Charge what another edge reports. What is not a report is ignored."""
        try:
            report = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            _log.warning("usage_report_unreadable", reason=str(error))
            return
        if report.edge == self._edge:
            return
        limiter, now_s = self._limiter, self._limiter.clock.monotonic_s()
        peer = self._peer(report, now_s)
        if peer is None:
            return
        for usage in report.accounts:
            limits = RateLimits(max(0, usage.requests_per_minute), max(0, usage.tokens_per_minute))
            account = limiter.reported(usage.account, limits)
            if account is not None:
                heard_whole = usage.opened_ms >= peer.whole_since_ms
                account.add_report(f"{report.edge}/{report.epoch}", usage, now_s, heard_whole=heard_whole)

    def _peer(self, report: UsageReport, now_s: float) -> PeerEdge | None:
        peer = self._peers.get(report.edge)
        if peer is None or peer.epoch != report.epoch or now_s - peer.heard_s > STALE_S:
            if peer is None and len(self._peers) >= PEERS_MAX and not self._forget(now_s):
                return None
            peer = self._peers[report.edge] = PeerEdge(report.epoch, report.sent_ms, now_s)
        peer.heard_s = now_s
        return peer

    def _forget(self, now_s: float) -> bool:
        silent = [name for name, peer in self._peers.items() if now_s - peer.heard_s > FORGET_S]
        for name in silent:
            del self._peers[name]
        return bool(silent)


class UsageSharing:
    """The reports of this edge, and its use of those of other edges."""

    def __init__(self, bus: Bus, ns: str, edge: str, epoch: int, limiter: RateLimiter) -> None:
        self._bus = bus
        self._limiter = limiter
        self._reports = UsageReports(limiter, edge, epoch)
        self._subject = subjects.usage(ns, edge)
        self._all = subjects.usage(ns, subjects.ANY)
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Begin to listen."""
        self._subscription = await self._bus.subscribe(self._all, self._on_report)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._limiter.sweep()
            data = self._reports.next_report()
            if data is not None:
                try:
                    await self._bus.publish(self._subject, data)
                except BusError as error:
                    _log.debug("usage_not_shared", reason=str(error))
            await self._limiter.clock.sleep(SHARE_S)

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _on_report(self, message: Message) -> None:
        self._reports.add(message.data)
