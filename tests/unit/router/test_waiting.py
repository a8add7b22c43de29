"""The waiting room: its bounds, its order, fairness between tenants, deadlines, and what it tells those it refuses."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.router.queue import (
    KNOWN_AFTER_S,
    MEMORY_S,
    RETRY_S_MAX,
    RETRY_S_MIN,
    RETRY_UNKNOWN_S,
    TENANTS_REMEMBERED_MAX,
    Admitted,
    DrainRate,
    PriorityClass,
    QueuedQuery,
    QueueLimits,
    Rejection,
    WaitingQueue,
)
from headwater.schemas.routing import RouteQuery
from tests.support.data.queries import route_query


def query(
    name: str,
    tokens: int = 100,
    tenant: str = "",
    *,
    priority: int = 0,
    deadline_ms: int = 0,
    tier: str = "",
    pinned: str = "",
) -> RouteQuery:
    """A query that may wait."""
    return route_query(
        name,
        tokens,
        pinned=pinned,
        tier=tier,
        priority=priority,
        tenant=tenant,
        deadline_ms=deadline_ms,
        waits=True,
    )


def put(room: WaitingQueue, asked: RouteQuery, now_s: float = 0.0, uncached: int = 0) -> QueuedQuery:
    """Let it wait; it must be let."""
    placed = room.admit(asked, now_s, uncached_tokens=uncached)
    assert isinstance(placed, Admitted), placed
    assert placed.displaced == []
    return placed.queued


def tokens_of(queries: Iterable[RouteQuery]) -> int:
    """What they count for."""
    return sum(max(1, one.prompt_tokens) for one in queries)


def served(room: WaitingQueue, count: int = 1_000, now_s: float = 0.0) -> list[str]:
    """Serve up to so many; their names, in order."""
    names: list[str] = []
    while len(names) < count and (one := room.next_query()) is not None:
        room.serve(one, now_s)
        names.append(one.query.request)
    return names


def test_lower_priorities_first_then_arrival() -> None:
    """Strictly; within one priority and tenant in order of arrival."""
    room = WaitingQueue(QueueLimits())
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        put(room, query(name, priority=priority))
    assert served(room) == ["c", "e", "a", "d", "b"]
    assert (len(room), room.tokens) == (0, 0)


def test_what_is_blocked_is_passed_over_and_keeps_its_place() -> None:
    """A query that only some worker may take does not keep others waiting, of its tenant or another."""
    room = WaitingQueue(QueueLimits())
    gold = put(room, query("a", tier="gold"))
    put(room, query("b", tier="gold"))
    put(room, query("c"))
    put(room, query("d", tenant="other", pinned="w1"))
    blocked = {gold.key}
    found = []
    while (one := room.next_query(blocked)) is not None:
        room.serve(one, 0.0)
        found.append(one.query.request)
    assert found == ["c", "d"]
    assert room.has_key(gold.key)
    assert not room.has_key(query("c").constraints)
    assert served(room) == ["a", "b"]


def test_the_same_query_again_waits_once() -> None:
    """It keeps its place."""
    room = WaitingQueue(QueueLimits())
    first = put(room, query("a"))
    assert room.admit(query("a"), 3.0) == Admitted(first, [])
    assert len(room) == 1


def test_shortest_uncached_first_and_how_long_others_overtake() -> None:
    """What comes more than uncached / ageing seconds later never goes first."""
    room = WaitingQueue(QueueLimits(order="shortest_uncached", ageing_tokens_s=100.0))
    put(room, query("long"), 0.0, uncached=1_000)
    put(room, query("short"), 1.0, uncached=10)
    put(room, query("just before"), 9.9, uncached=0)
    put(room, query("too late"), 10.1, uncached=0)
    assert served(room) == ["short", "just before", "long", "too late"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 5_000), st.floats(0.0, 2.0)), min_size=1, max_size=60
    )
)
def test_nobody_starves_under_shortest_uncached(story: list[tuple[int, int, float]]) -> None:
    """Whoever is served before another one came at most uncached / ageing seconds behind it."""
    ageing = 1_000.0
    room = WaitingQueue(QueueLimits(order="shortest_uncached", ageing_tokens_s=ageing))
    now_s, arrived, uncached = 0.0, {}, {}
    order: list[str] = []
    for number, (serve, tokens, pause_s) in enumerate(story):
        now_s += pause_s
        name = f"r{number}"
        arrived[name], uncached[name] = now_s, tokens
        put(room, query(name), now_s, uncached=tokens)
        order += served(room, serve, now_s)
    order += served(room, now_s=now_s)
    assert sorted(order) == sorted(arrived)
    for place, name in enumerate(order):
        for earlier in order[:place]:
            assert arrived[earlier] <= arrived[name] + uncached[name] / ageing + 1e-6


TENANTS = ("a", "b", "c")


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 400)), min_size=1, max_size=80))
def test_tenants_that_wait_all_the_time_are_given_the_same(arrivals: list[tuple[str, int]]) -> None:
    """At any moment until the first of them has nothing left, two differ by one prompt at most; a flood changes nothing."""
    room = WaitingQueue(QueueLimits())
    for number in range(500):
        put(room, query(f"flood{number}", 50, "flood"))
    waiting = dict.fromkeys(("flood", *TENANTS), 0) | {"flood": 500}
    for number, (tenant, tokens) in enumerate(arrivals):
        put(room, query(f"{tenant}{number}", tokens, tenant))
        waiting[tenant] += 1
    given_tokens = {tenant: 0 for tenant, count in waiting.items() if count}
    while all(waiting[tenant] for tenant in given_tokens):
        assert max(given_tokens.values()) - min(given_tokens.values()) <= 400
        one = room.next_query()
        assert one is not None
        room.serve(one, 0.0)
        given_tokens[one.query.flow.tenant] += one.tokens
        waiting[one.query.flow.tenant] -= 1


def test_having_been_away_is_no_credit() -> None:
    """A tenant that comes when others have long been served begins where they stand, not at nothing."""
    room = WaitingQueue(QueueLimits())
    for number in range(100):
        put(room, query(f"a{number}", tenant="a"))
    assert len(served(room, 50)) == 50
    for number in range(10):
        put(room, query(f"b{number}", tenant="b"))
    turns = served(room, 20)
    assert 9 <= sum(name.startswith("b") for name in turns) <= 11
    assert turns[:2] != ["b0", "b1"]


def test_leaving_for_a_moment_settles_no_account() -> None:
    """A tenant that sends one large prompt after the other, and has none waiting in between, is given no more."""
    room = WaitingQueue(QueueLimits())
    for number in range(200):
        put(room, query(f"a{number}", 100, "a"))
    turns: list[str] = []
    for number in range(110):
        if not any(one.query.flow.tenant == "b" for one in room.queries()):
            put(room, query(f"b{number}", 1_000, "b"))
        turns += served(room, 1)
    assert 9 <= sum(name.startswith("b") for name in turns) <= 11


def test_accounts_of_those_away_are_bounded() -> None:
    """Tenants that come once are forgotten, those who were given most last."""
    waiting = PriorityClass()

    def one(number: int, tenant: str, tokens: int) -> QueuedQuery:
        asked = query(f"r{number}", tokens, tenant)
        return QueuedQuery(0.0, number, asked, 0.0, float("inf"), 0.0)

    waiting.enqueue(one(0, "stays", 1))
    for number in range(1, 2 * TENANTS_REMEMBERED_MAX):
        made = one(number, f"t{number}", number)
        waiting.enqueue(made)
        waiting.remove(made, served=True)
    assert len(waiting._absent) <= TENANTS_REMEMBERED_MAX
    assert f"t{2 * TENANTS_REMEMBERED_MAX - 1}" in waiting._absent


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("put", "serve", "drop")),
        st.integers(0, 30),
        st.integers(0, 300),
        st.sampled_from(TENANTS),
        st.integers(-1, 1),
    ),
    max_size=120,
)


@given(STEPS)
def test_the_bounds_hold_and_everything_leaves_once(steps: list[tuple[str, int, int, str, int]]) -> None:
    """In requests, tokens and shares; who is refused is told why, and sums stay those of what waits."""
    limits = QueueLimits(requests=10, tokens=1_000, tenant_share=0.5)
    room = WaitingQueue(limits)
    inside: dict[str, RouteQuery] = {}
    for number, (what, which, tokens, tenant, priority) in enumerate(steps):
        own = [one for one in inside.values() if one.flow.tenant == tenant]
        if what == "put":
            asked = query(f"r{number}", tokens, tenant, priority=priority)
            placed = room.admit(asked, float(number))
            cost = max(1, tokens)
            if isinstance(placed, Admitted):
                for left, refused in placed.displaced:
                    assert inside.pop(left.query.request).flow.priority > priority
                    assert (refused.reason, refused.refused.status) == ("displaced", 503)
                own = [one for one in inside.values() if one.flow.tenant == tenant]
                assert len(own) + 1 <= 5
                assert not own or tokens_of(own) + cost <= 500
                assert not inside or tokens_of(inside.values()) + cost <= 1_000
                inside[asked.request] = asked
                assert len(inside) <= 10
            elif placed.reason == "tenant":
                kept = [one for one in own if one.flow.priority <= priority]
                assert len(kept) == 5 or tokens_of(kept) + cost > 500
                assert placed.refused.status == 429
            else:
                kept = [one for one in inside.values() if one.flow.priority <= priority]
                assert len(kept) == 10 or tokens_of(kept) + cost > 1_000
                assert placed.refused.status == 503
        elif what == "drop":
            name = f"r{which}"
            assert (room.remove(name, float(number)) is not None) == (inside.pop(name, None) is not None)
        elif (one := room.next_query()) is not None:
            room.serve(one, float(number))
            served_query = inside.pop(one.query.request)
            assert served_query.flow.priority == min(
                [served_query.flow.priority, *(other.flow.priority for other in inside.values())]
            )
        assert [one.query.request for one in room.queries()] == list(inside)
        assert room.tokens == sum(max(1, one.prompt_tokens) for one in inside.values())
    assert sorted(served(room)) == sorted(inside)
    assert (len(room), room.tokens, room._usage, room._keys, room._classes) == (0, 0, {}, {}, {})


def test_a_tenants_share_is_exact() -> None:
    """Half of ten requests are five; of a room of one, one tenant's only request is all of it."""
    room = WaitingQueue(QueueLimits(requests=10, tenant_share=0.5))
    placed = [room.admit(query(f"r{number}", 1, "a"), 0.0) for number in range(6)]
    assert [isinstance(one, Admitted) for one in placed] == [True] * 5 + [False]
    put(room, query("b", 1, "b"))
    assert isinstance(WaitingQueue(QueueLimits(requests=1)).admit(query("a"), 0.0), Admitted)


def test_a_prompt_larger_than_the_bound_may_wait_alone() -> None:
    """Else nobody could ever send it; beside others it is refused."""
    room = WaitingQueue(QueueLimits(tokens=1_000))
    put(room, query("huge", 5_000))
    turned = room.admit(query("small", 1, "b"), 0.0)
    assert isinstance(turned, Rejection)
    assert turned.reason == "full"
    assert served(room) == ["huge"]


def test_a_room_of_no_requests_refuses_all() -> None:
    """Thresholds without a queue."""
    turned = WaitingQueue(QueueLimits(requests=0)).admit(query("a"), 0.0)
    assert isinstance(turned, Rejection)
    assert (turned.refused.status, turned.refused.final) == (503, True)


def test_a_deadline_that_has_passed_or_can_not_be_met_any_more() -> None:
    """What the prompt itself takes counts as well; `overdue` names it once, and it stays until it is dropped."""
    room = WaitingQueue(QueueLimits())
    assert isinstance(room.admit(query("a", deadline_ms=2_000), 10.0, serve_s=0.5), Admitted)
    put(room, query("b"), 10.0)
    assert room.find_expired(11.4) == []
    [(late, turned)] = room.find_expired(11.6)
    assert late.query.request == "a"
    assert turned.reason == "deadline"
    assert "2000 ms" in turned.refused.reason
    assert (turned.refused.status, turned.refused.final, turned.refused.code) == (
        503,
        True,
        "deadline_exceeded",
    )
    assert len(room) == 2
    hopeless = room.admit(query("c", deadline_ms=100), 10.0, serve_s=0.2)
    assert isinstance(hopeless, Rejection)
    assert hopeless.reason == "deadline"


def test_waiting_has_a_longest() -> None:
    """Beyond it the client is told."""
    room = WaitingQueue(QueueLimits(wait_s=5.0))
    put(room, query("a"), 1.0)
    put(room, query("b"), 2.0)
    assert [(one.query.request, turned.reason) for one, turned in room.find_expired(6.0)] == [("a", "waited")]


def draining(tokens_s: float, seconds: int = 30) -> WaitingQueue:
    """A room that has been draining at this rate until now, and in which 10,000 tokens of tenant `a` wait."""
    room = WaitingQueue(QueueLimits(requests=1_000))
    for number in range(seconds * 10):
        put(room, query(f"x{number}", round(tokens_s / 10), "x"))
    for number in range(seconds * 10):
        assert served(room, 1, (number + 1) / 10) == [f"x{number}"]
    for number in range(100):
        put(room, query(f"a{number}", 100, "a"), float(seconds))
    return room


def test_retry_after_is_when_it_would_have_been_its_turn() -> None:
    """From what is ahead of it and how fast the room drains; within bounds, and a guess where nothing is known."""
    assert WaitingQueue(QueueLimits()).retry_after_s(query("n")) == RETRY_UNKNOWN_S
    room = draining(1_000.0)
    assert room.retry_after_s(query("n", 100, "a")) == pytest.approx(10.0, rel=0.25)
    # Another tenant need not wait for all of that: its turn comes behind as much as it sends itself.
    assert room.retry_after_s(query("n", 3_000, "b")) == pytest.approx(3.0, rel=0.25)
    assert room.retry_after_s(query("n", 100, "a", priority=-1)) == RETRY_S_MIN
    assert draining(10.0).retry_after_s(query("n", 100, "a")) == RETRY_S_MAX


def test_a_deadline_that_the_queue_is_too_long_for_is_refused_at_once() -> None:
    """By the estimate; one that is long enough waits."""
    room = draining(1_000.0)
    turned = room.admit(query("n", 100, "a", deadline_ms=4_000), 30.0)
    assert isinstance(turned, Rejection)
    assert turned.reason == "deadline"
    assert turned.refused.retry_after_s == pytest.approx(10.0, rel=0.25)
    put(room, query("m", 100, "a", deadline_ms=30_000), 30.0)


def test_the_rate_counts_only_time_in_which_something_waits() -> None:
    """Quiet hours do not make a queue slow; after them nothing is known."""
    rate = DrainRate()
    for second in range(1, 20):
        rate.advance(float(second), waiting=bool(second % 2))
        if second % 2:
            rate.count_served(500)
        if second <= KNOWN_AFTER_S:
            assert rate.tokens_s == 0.0, "one served at once would be extrapolated to any rate"
    assert rate.tokens_s == pytest.approx(500.0, rel=0.1)
    rate.advance(20 + 10 * MEMORY_S, waiting=False)
    assert rate.tokens_s == 0.0


def displaced_by(room: WaitingQueue, asked: RouteQuery) -> list[str]:
    """Let it wait; the names of those that leave for it."""
    placed = room.admit(asked, 1.0)
    assert isinstance(placed, Admitted), placed
    return [one.query.request for one, _ in placed.displaced]


def test_an_urgent_query_takes_the_place_of_the_latest_of_the_least_urgent() -> None:
    """At either bound. Equal priorities never displace each other, whoever came first."""
    room = WaitingQueue(QueueLimits(requests=4, tenant_share=1.0))
    for name, priority in (("batch 1", 5), ("normal", 0), ("batch 2", 5), ("bulk", 9)):
        put(room, query(name, priority=priority))
    assert displaced_by(room, query("urgent 1", priority=-1)) == ["bulk"]
    assert displaced_by(room, query("urgent 2", priority=-1)) == ["batch 2"]
    late = room.admit(query("batch 3", priority=5), 1.0)
    assert isinstance(late, Rejection)
    assert late.reason == "full"
    assert displaced_by(room, query("urgent 3", priority=-1)) == ["batch 1"]
    assert displaced_by(room, query("urgent 4", priority=-1)) == ["normal"]
    refused = room.admit(query("urgent 5", priority=-1), 1.0)
    assert isinstance(refused, Rejection)
    assert served(room) == ["urgent 1", "urgent 2", "urgent 3", "urgent 4"]


def test_as_many_leave_as_the_tokens_of_a_prompt_need_and_none_in_vain() -> None:
    """A prompt that does not fit even then displaces nobody."""
    room = WaitingQueue(QueueLimits(tokens=1_000, tenant_share=1.0))
    put(room, query("normal", 500))
    for number in range(4):
        put(room, query(f"batch {number}", 100, priority=5))
    assert isinstance(room.admit(query("too long", 600), 1.0), Rejection)
    assert len(room) == 5
    assert displaced_by(room, query("urgent", 300, priority=-1)) == ["batch 3", "batch 2"]


def test_a_tenant_makes_room_for_its_own_urgent_query_first() -> None:
    """Its share is its own affair: no other tenant's query leaves for it."""
    room = WaitingQueue(QueueLimits(requests=10, tenant_share=0.5))
    for number in range(5):
        put(room, query(f"batch {number}", 1, "a", priority=5))
        put(room, query(f"other {number}", 1, "b", priority=9))
    assert displaced_by(room, query("urgent", 1, "a", priority=-1)) == ["batch 4"]
