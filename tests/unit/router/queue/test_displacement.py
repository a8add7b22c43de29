"""At the queue's bounds the lowest waiting priority makes room for a higher one, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.queue.admission_queue import AdmissionQueue, Now, Offered
from headwater.router.queue.limits import BusyLimits, QueueLimits, QueueSettings
from headwater.schemas.events.route import RouteQuery, RouteRefused
from tests.support.data.examples import packed
from tests.support.data.queries import route_query
from tests.support.worlds.clock import WALL_NS
from tests.unit.router.queue.test_admission_queue import Router

URGENT, USUAL, BATCH = -10, 0, 10
NOW = Now(10.0, WALL_NS)


def query(
    name: str, priority: int = USUAL, tenant: str = "", tokens: int = 64, deadline_ms: int = 0
) -> RouteQuery:
    """One that may wait."""
    return route_query(
        name,
        tokens,
        8,
        packed(1, 2, 3, 4),
        waits=True,
        priority=priority,
        tenant=tenant,
        deadline_ms=deadline_ms,
    )


def busy(**limits: float) -> AdmissionQueue:
    """A queue in front of one worker that takes no more."""
    router = Router(w1="both")
    router.give("w1", 1_600)
    bounds = QueueLimits(**{"tenant_share": 1.0, **limits})  # type: ignore[arg-type]
    return AdmissionQueue(QueueSettings(BusyLimits(prefill_tokens=1_000), bounds), router, NOW)


def names(queue: AdmissionQueue) -> list[str]:
    """What waits, in order of arrival."""
    return [one.query.request for one in queue.waiting.queries()]


def is_queued(offered: Offered) -> bool:
    """Does it wait?"""
    return offered.reply is None


def displaced(offered: Offered) -> list[str]:
    """Who left the queue for it."""
    return [one.queued.query.request for one in offered.displaced]


def test_urgent_requests_are_queued_while_batch_waits() -> None:
    """All ten of them: each takes the place of the batch request that came last."""
    queue = busy(requests=10)
    assert all(is_queued(queue.offer(query(f"batch-{number}", BATCH), NOW)) for number in range(10))
    offered = [queue.offer(query(f"urgent-{number}", URGENT), NOW) for number in range(10)]
    assert [one.reason for one in offered if not is_queued(one)] == []
    assert [name for one in offered for name in displaced(one)] == [f"batch-{n}" for n in range(9, -1, -1)]
    assert names(queue) == [f"urgent-{number}" for number in range(10)]


def test_who_is_displaced_is_told_as_if_the_queue_had_been_full() -> None:
    """503 with a time to come again, as for one that arrives at a full queue; its reason is a word of its own for the metrics."""
    queue = busy(requests=1)
    queue.offer(query("batch", BATCH), NOW)
    [released] = queue.offer(query("urgent", URGENT), NOW).displaced
    assert isinstance(released.reply, RouteRefused)
    assert (released.reply.status, released.reply.code) == (503, "overloaded")
    assert released.reply.retry_after_s > 0
    assert released.reason == "displaced"


def test_the_lowest_priority_makes_room_first() -> None:
    """Not the one that came last."""
    queue = busy(requests=3)
    for name, priority in (("batch", BATCH), ("usual", USUAL), ("urgent", URGENT)):
        queue.offer(query(name, priority), NOW)
    assert displaced(queue.offer(query("first", URGENT), NOW)) == ["batch"]
    assert displaced(queue.offer(query("second", URGENT), NOW)) == ["usual"]
    refused = queue.offer(query("third", URGENT), NOW)
    assert (refused.reason, displaced(refused)) == ("full", [])
    assert names(queue) == ["urgent", "first", "second"]


@pytest.mark.parametrize("priority", [BATCH, BATCH + 1])
def test_equal_and_lower_priorities_displace_nobody(priority: int) -> None:
    """Who waits already keeps its place."""
    queue = busy(requests=1)
    queue.offer(query("first", BATCH), NOW)
    refused = queue.offer(query("second", priority), NOW)
    assert (refused.reason, displaced(refused)) == ("full", [])
    assert names(queue) == ["first"]


def test_tokens_make_room_as_requests_do() -> None:
    """As many leave as are needed, and no more."""
    queue = busy(tokens=300)
    for number in range(3):
        queue.offer(query(f"batch-{number}", BATCH, tokens=100), NOW)
    assert displaced(queue.offer(query("urgent", URGENT, tokens=150), NOW)) == ["batch-2", "batch-1"]
    assert queue.waiting.tokens == 250


def test_nobody_leaves_for_a_request_that_is_refused_all_the_same() -> None:
    """Too large even without them, past its deadline, or beyond its tenant's share."""
    queue = busy(requests=10, tokens=1_000, tenant_share=0.5)
    queue.offer(query("a", URGENT, "first", tokens=500), NOW)
    queue.offer(query("b", BATCH, "second", tokens=500), NOW)
    for refused in (
        queue.offer(query("large", URGENT, "third", tokens=600), NOW),
        queue.offer(query("late", URGENT, "third", tokens=100, deadline_ms=1), NOW),
        queue.offer(query("greedy", URGENT, "first", tokens=100), NOW),
    ):
        assert not is_queued(refused)
        assert displaced(refused) == []
    assert names(queue) == ["a", "b"]


def test_a_tenant_at_its_share_displaces_its_own_batch_only() -> None:
    """Its urgent request is not refused for its own batch, and does not cost others their places."""
    queue = busy(requests=4, tenant_share=0.5)
    for name, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        queue.offer(query(name, BATCH, tenant), NOW)
    offered = queue.offer(query("a3", URGENT, "a"), NOW)
    assert is_queued(offered)
    assert displaced(offered) == ["a2"]
    assert names(queue) == ["a1", "b1", "a3"]


OFFERS = st.lists(
    st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(1, 400)), min_size=1, max_size=40
)


@given(OFFERS)
def test_no_request_is_refused_for_a_lower_priority(offers: list[tuple[int, str, int]]) -> None:
    """Whatever comes in whatever order: bounds hold, whoever left is told once, and "full" means full of one's own rank."""
    queue = busy(requests=6, tokens=1_000)
    waiting: dict[str, RouteQuery] = {}
    for number, (priority, tenant, tokens) in enumerate(offers):
        asked = query(f"r{number}", priority, tenant, tokens)
        offered = queue.offer(asked, NOW)
        for name in displaced(offered):
            assert waiting.pop(name).flow.priority > priority
        if is_queued(offered):
            waiting[asked.request] = asked
        else:
            kept = [one for one in waiting.values() if one.flow.priority <= priority]
            held = sum(one.prompt_tokens for one in kept)
            assert len(kept) == 6 or (kept and held + tokens > 1_000)
        assert names(queue) == list(waiting)
        assert len(waiting) <= 6
        assert len(waiting) == 1 or sum(one.prompt_tokens for one in waiting.values()) <= 1_000
