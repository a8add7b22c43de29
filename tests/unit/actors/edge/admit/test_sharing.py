"""Use of limits between edges: what they tell each other, what is lost on the way, and how far they exceed a limit."""

import msgspec
import pytest

from headwater.actors.edge.admit.account import ALL_MODELS, FORGET_S, STALE_S, LimitHolder, account_key
from headwater.actors.edge.admit.limiter import (
    IDLE_S,
    PEERS_MAX,
    REPEAT_S,
    SHARE_S,
    RateLimiter,
    RequestQuota,
    UsageReports,
    UsageSharing,
)
from headwater.actors.edge.settings import RateLimits
from headwater.actors.http.errors import ApiError
from headwater.actors.runtime.ports import MemoryBus
from headwater.schemas.inference import UsageReport
from tests.bench.limits import BURST_AT_S, simulate
from tests.support.worlds.clock import ManualClock, running

LIMITS = RateLimits(requests_per_minute=60, tokens_per_minute=6000)
IN_FLIGHT = RateLimits(concurrent_requests=10)


class Edge:
    """The limiter of one edge, and its reports."""

    def __init__(self, clock: ManualClock, name: str, epoch: int = 1) -> None:
        self.limiter = RateLimiter(clock)
        self.reports = UsageReports(self.limiter, name, epoch)

    def admit(self, requests: int = 1, limits: RateLimits = LIMITS) -> list[RequestQuota]:
        """Requests that begin now."""
        quotas = [self.limiter.quota(LimitHolder("key", limits)) for _ in range(requests)]
        for quota in quotas:
            quota.enter("model")
        return quotas

    def remaining(self) -> int:
        """Requests that would be admitted now."""
        account = self.limiter.find(account_key("key", ALL_MODELS))
        assert account is not None
        assert account.requests is not None
        return account.requests.left(self.limiter.clock.monotonic_s())

    def tell(self, *others: "Edge") -> bool:
        """Its next report reaches these edges; False if there is none."""
        data = self.reports.next_report()
        for other in others:
            if data is not None:
                other.reports.add(data)
        return data is not None


def done(quotas: list[RequestQuota]) -> None:
    """They end."""
    for quota in quotas:
        quota.leave()


def test_an_edge_charges_what_another_admitted(clock: ManualClock) -> None:
    """Once, however often it is reported."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    done(one.admit(20))
    for _ in range(3):
        one.tell(two)
    assert two.remaining() == 40
    done(one.admit(5))
    one.tell(two)
    done(two.admit(10))
    two.tell(one)
    assert one.remaining() == two.remaining() == 25


def test_tokens_given_back_are_given_back_everywhere(clock: ManualClock) -> None:
    """A correction at one edge reaches the others."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    (quota,) = one.admit()
    quota.reserve(1000, 4000)
    one.tell(two)
    (other,) = two.admit()
    with pytest.raises(ApiError):
        other.reserve(2000, 0)
    quota.settle(1500)
    one.tell(two)
    other.reserve(2000, 0)


async def test_lost_reports_are_made_good(clock: ManualClock) -> None:
    """By the next one; a change is repeated for a while."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    done(one.admit(20))
    one.tell()
    await clock.advance(REPEAT_S - SHARE_S)
    one.tell(two)
    assert two.remaining() == 40
    await clock.advance(REPEAT_S)
    one.tell()
    assert not one.tell(), "nothing changed"


async def test_an_edge_that_starts_takes_over_the_estimate_of_the_others(clock: ManualClock) -> None:
    """It heard nothing of what was used before."""
    one, late = Edge(clock, "one"), Edge(clock, "late")
    done(one.admit(50))
    await clock.advance(1)
    one.tell(late)
    assert late.remaining() == 11
    # Its totals are known from now on.
    done(one.admit(5))
    one.tell(late)
    assert late.remaining() == 6


async def test_an_edge_that_starts_again_begins_anew(clock: ManualClock) -> None:
    """Its totals begin at zero: those of its previous incarnation are neither charged twice nor subtracted."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    done(one.admit(20))
    one.tell(two)
    again = Edge(clock, "one", epoch=2)
    again.tell(two)
    await clock.advance(0.001)
    done(again.admit(10))
    again.tell(two)
    assert two.remaining() == 30


async def test_a_partition_is_charged_once_it_ends(clock: ManualClock) -> None:
    """Each edge enforces the limit alone; afterwards at most one minute's limit is charged."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    (first,) = one.admit()
    first.leave()
    one.tell(two)
    for _ in range(300):
        await clock.advance(1)
        done(one.admit(1))
        done(two.admit(1))
    one.tell(two)
    assert two.remaining() == 0
    with pytest.raises(ApiError) as caught:
        two.admit()
    assert caught.value.retry_after_s < 62


async def test_requests_in_flight_at_other_edges_count_while_these_report(clock: ManualClock) -> None:
    """An edge that is gone holds no places; one whose requests only run on keeps them."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    one.admit(9, IN_FLIGHT)
    one.tell(two)
    two.admit(1, IN_FLIGHT)
    with pytest.raises(ApiError, match="in flight"):
        two.admit(1, IN_FLIGHT)
    for _ in range(round(3 * STALE_S / IDLE_S)):
        await clock.advance(IDLE_S)
        one.tell(two)
        with pytest.raises(ApiError, match="in flight"):
            two.admit(1, IN_FLIGHT)
    await clock.advance(STALE_S + 0.1)
    two.admit(9, IN_FLIGHT)


@pytest.mark.parametrize("kept", [False, True])
async def test_what_is_forgotten_does_not_come_back(clock: ManualClock, kept: bool) -> None:
    """Totals of an account that was idle begin again, also where the edge that used it still has it."""
    one, two = Edge(clock, "one"), Edge(clock, "two")
    one.tell(two)
    done(one.admit(30))
    one.tell(two)
    for _ in range(round(FORGET_S) + 5):
        await clock.advance(1)
        one.tell(two)
        if not kept:
            one.limiter.sweep()
        two.limiter.sweep()
    assert len(two.limiter) == 0
    done(one.admit(3))
    one.tell(two)
    assert two.remaining() == 57


def test_nonsense_is_ignored(clock: ManualClock) -> None:
    """Bytes that are no report, its own report, and more edges than there can be."""
    one = Edge(clock, "one")
    one.reports.add(b"\xff\x00 nonsense")
    one.admit()
    data = one.reports.next_report()
    assert data is not None
    one.reports.add(data)
    assert one.remaining() == 59
    for number in range(PEERS_MAX + 50):
        one.reports.add(msgspec.msgpack.encode(UsageReport(f"e{number}", 1, 0, ())))
    assert len(one.reports._peers) == PEERS_MAX


async def test_edges_share_over_the_bus(clock: ManualClock) -> None:
    """As actors do it."""
    bus = MemoryBus()
    limiters = [RateLimiter(clock), RateLimiter(clock)]
    sharings = [UsageSharing(bus, "ns", f"edge-{n}", 1, limiter) for n, limiter in enumerate(limiters)]
    for sharing in sharings:
        await sharing.start()
    async with running(sharings[0].run()), running(sharings[1].run()):
        await clock.advance(0.01)
        for _ in range(60):
            limiters[0].quota(LimitHolder("key", LIMITS)).enter("model")
        await clock.advance(SHARE_S)
        with pytest.raises(ApiError):
            limiters[1].quota(LimitHolder("key", LIMITS)).enter("model")
    for sharing in sharings:
        await sharing.stop()


@pytest.mark.parametrize(("edges", "lost"), [(1, 0.0), (2, 0.0), (4, 0.0), (4, 0.5)])
def test_the_excess_is_as_documented(edges: int, lost: float) -> None:
    """A burst: at most a minute's limit at each edge. In the long run: what was admitted too much is made up for."""
    run = simulate(edges, lost=lost, duration_s=60.0 * (edges + 2))
    burst = run.excess(BURST_AT_S, BURST_AT_S + 1)
    assert burst <= edges + 0.1
    assert edges == 1 or burst > 1.5, "the worst case is one"
    assert run.excess(0, run.duration_s) <= 1.1
    assert abs(run.excess(run.duration_s - 60, run.duration_s)) <= 0.05
