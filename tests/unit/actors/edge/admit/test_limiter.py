"""What a request takes from its account: counted, reserved, corrected and given back, in bounded memory."""

import pytest

from headwater.actors.edge.admit.account import CLOSE_S, LimitHolder, holder_of
from headwater.actors.edge.admit.control import ANONYMOUS, Principal
from headwater.actors.edge.admit.limiter import DEFAULT_ANSWER_TOKENS, RateLimiter, RequestQuota
from headwater.actors.edge.settings import UNLIMITED, RateLimits
from headwater.actors.http.errors import ApiError
from headwater.schemas.tables import UsageLimits
from tests.support.worlds.clock import ManualClock


@pytest.fixture
def limiter(clock: ManualClock) -> RateLimiter:
    """An edge's."""
    return RateLimiter(clock)


def entered(limiter: RateLimiter, limits: RateLimits, holder: str = "a", model: str = "m") -> RequestQuota:
    """A request that was counted."""
    quota = limiter.quota(LimitHolder(holder, limits))
    quota.enter(model)
    return quota


def refused(limiter: RateLimiter, limits: RateLimits, holder: str = "a", model: str = "m") -> ApiError:
    """The error of a request that is not admitted."""
    with pytest.raises(ApiError) as caught:
        entered(limiter, limits, holder, model)
    assert caught.value.status == 429
    return caught.value


def shown(quota: RequestQuota) -> dict[str, str]:
    """Its headers, without what they all begin with."""
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in quota.headers()}


def test_without_limits_nothing_is_counted(limiter: RateLimiter) -> None:
    """No account, no header."""
    quota = entered(limiter, UNLIMITED)
    quota.reserve(10**9, None)
    quota.settle(10**9)
    quota.leave()
    assert len(limiter) == 0
    assert quota.headers() == []
    assert quota.context("m", 4096) == 4096


async def test_requests_are_limited_per_holder(limiter: RateLimiter, clock: ManualClock) -> None:
    """The third of two a minute waits half a minute, whichever model it names; other holders are not concerned."""
    limits = RateLimits(requests_per_minute=2)
    entered(limiter, limits).leave()
    quota = entered(limiter, limits)
    assert shown(quota) == {"limit-requests": "2", "remaining-requests": "0", "reset-requests": "1m0s"}
    quota.leave()
    error = refused(limiter, limits)
    assert error.retry_after_s == pytest.approx(30)
    assert error.code == "rate_limit_exceeded"
    assert "2 requests per minute" in str(error)
    entered(limiter, limits, holder="b")
    refused(limiter, limits, model="n")
    await clock.advance(30)
    entered(limiter, limits)
    refused(limiter, limits)


def test_a_model_can_have_limits_of_its_own(limiter: RateLimiter) -> None:
    """Besides those for all models; the response shows the ones that have least left."""
    holder = LimitHolder("a", RateLimits(requests_per_minute=3), {"m": UsageLimits(requests_per_minute=1)})
    first = limiter.quota(holder)
    first.enter("m")
    assert shown(first)["limit-requests"] == "1"
    second = limiter.quota(holder)
    with pytest.raises(ApiError, match="1 requests per minute"):
        second.enter("m")
    third = limiter.quota(holder)
    third.enter("n")
    assert shown(third) == {"limit-requests": "3", "remaining-requests": "1", "reset-requests": "40s"}


def test_a_keys_limits_replace_the_defaults(limiter: RateLimiter) -> None:
    """Each where it is set. Without a credential the tenant holds the defaults."""
    defaults = RateLimits(requests_per_minute=10, tokens_per_minute=100)
    key = Principal("t", "key-1", limits=UsageLimits(requests_per_minute=5, context_tokens=7))
    assert holder_of(key, "t", defaults).limits == RateLimits(5, 100, 0, 7)
    assert holder_of(key, "t", defaults).name == "key-1"
    assert holder_of(Principal("t", "key-2"), "t", defaults).limits == defaults
    anonymous = holder_of(ANONYMOUS, "acme", defaults)
    assert anonymous.limits == defaults
    assert anonymous.name != holder_of(ANONYMOUS, "other", defaults).name
    assert not holder_of(ANONYMOUS, "acme", UNLIMITED).limited


def test_requests_in_flight_are_limited(limiter: RateLimiter) -> None:
    """A place is free once a request ended, however often it says so."""
    limits = RateLimits(concurrent_requests=2)
    first, _ = entered(limiter, limits), entered(limiter, limits)
    assert "2 requests in flight" in str(refused(limiter, limits))
    first.leave()
    first.leave()
    entered(limiter, limits)
    refused(limiter, limits)


def test_a_refused_request_holds_nothing(limiter: RateLimiter) -> None:
    """It is neither in flight nor counted, and still shows the limits."""
    limits = RateLimits(requests_per_minute=1, concurrent_requests=1)
    first = entered(limiter, limits)
    quota = limiter.quota(LimitHolder("a", limits))
    with pytest.raises(ApiError):
        quota.enter("m")
    assert shown(quota)["remaining-requests"] == "0"
    quota.leave()
    first.leave()
    assert "requests per minute" in str(refused(limiter, limits))


def test_tokens_are_reserved_and_corrected(limiter: RateLimiter) -> None:
    """Prompt and all answers before; what was used, after."""
    limits = RateLimits(tokens_per_minute=1000)
    quota = entered(limiter, limits)
    quota.reserve(100, 200, answers=2)
    assert shown(quota) == {"limit-tokens": "1000", "remaining-tokens": "500", "reset-tokens": "30s"}
    other = entered(limiter, limits)
    with pytest.raises(ApiError, match="may use 501"):
        other.reserve(501, 0)
    quota.settle(150)
    quota.leave()
    assert shown(quota)["remaining-tokens"] == "850"
    other.reserve(501, 0)
    assert shown(other)["remaining-tokens"] == "349"


def test_a_request_that_generated_nothing_gives_its_tokens_back(limiter: RateLimiter) -> None:
    """It failed before a worker had it."""
    limits = RateLimits(tokens_per_minute=1000)
    quota = entered(limiter, limits)
    quota.reserve(900, 100)
    quota.leave()
    assert shown(quota)["remaining-tokens"] == "1000"


def test_a_request_without_a_limit_of_its_own_is_admitted(limiter: RateLimiter) -> None:
    """It reserves a default, at most the whole limit, and owes what it generates beyond that."""
    limits = RateLimits(tokens_per_minute=10_000)
    quota = entered(limiter, limits)
    quota.reserve(100, None)
    assert shown(quota)["remaining-tokens"] == str(10_000 - 100 - DEFAULT_ANSWER_TOKENS)
    quota.settle(25_000)
    quota.leave()
    assert shown(quota)["remaining-tokens"] == "0"
    late = entered(limiter, limits)
    with pytest.raises(ApiError) as caught:
        late.reserve(1, 0)
    assert caught.value.retry_after_s == pytest.approx(90, abs=0.1)
    small = entered(limiter, RateLimits(tokens_per_minute=200), holder="b")
    small.reserve(100, None)
    assert shown(small)["remaining-tokens"] == "0"


@pytest.mark.parametrize(("prompt", "answer"), [(1001, None), (900, 101)])
def test_what_never_fits_is_not_to_be_retried(limiter: RateLimiter, prompt: int, answer: int | None) -> None:
    """The clients of OpenAI and Anthropic read this header."""
    quota = entered(limiter, RateLimits(tokens_per_minute=1000))
    with pytest.raises(ApiError, match="too large") as caught:
        quota.reserve(prompt, answer)
    assert caught.value.status == 429
    assert caught.value.headers == [(b"x-should-retry", b"false")]
    assert caught.value.retry_after_s == 0


def test_the_context_is_the_shorter_one(limiter: RateLimiter) -> None:
    """Of the model and of the holder."""
    quota = limiter.quota(
        LimitHolder("a", RateLimits(context_tokens=100), {"m": UsageLimits(context_tokens=70)})
    )
    assert quota.context("n", 4096) == 100
    assert quota.context("m", 4096) == 70
    assert quota.context("n", 50) == 50


def test_limits_change_while_they_are_in_use(limiter: RateLimiter) -> None:
    """The next request is under the new ones, and what was used stays used."""
    entered(limiter, RateLimits(requests_per_minute=1))
    refused(limiter, RateLimits(requests_per_minute=1))
    entered(limiter, RateLimits(requests_per_minute=2))
    refused(limiter, RateLimits(requests_per_minute=2))
    entered(limiter, RateLimits(requests_per_minute=0, tokens_per_minute=5))
    refused(limiter, RateLimits(concurrent_requests=3))


async def test_idle_accounts_are_forgotten(limiter: RateLimiter, clock: ManualClock) -> None:
    """Not while a request runs, nor while anything is used."""
    limits = RateLimits(requests_per_minute=1)
    running = entered(limiter, limits)
    entered(limiter, limits, holder="b").leave()
    await clock.advance(CLOSE_S + 1)
    limiter.sweep()
    assert len(limiter) == 2
    await clock.advance(60)
    limiter.sweep()
    assert len(limiter) == 1
    running.leave()
    await clock.advance(CLOSE_S + 61)
    limiter.sweep()
    assert len(limiter) == 0


def test_holders_beyond_the_bound_share_one_account(clock: ManualClock) -> None:
    """Memory is bounded, and nobody gets around a limit by inventing names."""
    limiter = RateLimiter(clock, accounts_max=10)
    limits = RateLimits(requests_per_minute=3)
    for number in range(10):
        entered(limiter, limits, holder=str(number))
    for number in range(10, 13):
        entered(limiter, limits, holder=str(number))
    for number in range(13, 1000):
        refused(limiter, limits, holder=str(number))
    assert len(limiter) == 11
    entered(limiter, limits, holder="5")
