"""The queue of queries that wait: its bounds, deadlines and order, and the order of a burst. Pure.

Light to import: the command line reads the limits, their defaults and descriptions from here.

In the queue, lower priorities are served first, strictly. Within one priority, tenants share by prompt tokens (`PriorityClass`): a tenant's
queries form one line for each `PlacementKey`, and if the head of a line cannot be placed, no other query in it can.
Within one tenant the order is that of arrival (`fcfs`), or fewest uncached prompt tokens first (`shortest_uncached`). The latter
ages: each second in the queue counts as `ageing_tokens_s` tokens less, so a query with U uncached tokens is never
overtaken by one that arrives more than U / ageing_tokens_s seconds later.

At the bounds of `QueueLimits` a query displaces later ones of a less urgent priority, if enough of them wait. Else it is refused:
with 429 if its tenant has used its share, else with 503. All times are passed in, in seconds of a monotonic clock.

The queries of a burst are decided highest regret first.

Each decision takes capacity on some worker. The query that would lose most by not getting its best worker (which caches its prefix,
or is the only idle one) is decided before those that are as well off elsewhere. On a public trace whose
requests arrive ten at a time this takes a twentieth off the mean time to the first token.

They are answered shortest prompt first. An engine computes prompts in the order in which it gets them, so where several of a burst go to
one worker, a short one does not wait for a long one.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence, Set
from math import exp
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta

from headwater.schemas.routing import Constraints, Decision, RouteQuery, RouteRefused, RouteReply

Order = Literal["fcfs", "shortest_uncached"]


class BusyLimits(NamedTuple):
    """A worker above any of these limits is saturated: it gets no request that can wait or run elsewhere. 0: no limit."""

    prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a worker is saturated above this many prompt tokens routed to it and not yet computed; "
            "0 disables (default: 16 scheduler steps of 8,192 tokens)",
        ),
    ] = 131_072
    kv: Annotated[
        float,
        Meta(
            ge=0,
            description="a worker is saturated above this share of KV blocks in use by its requests, such as 0.9 "
            "(shared blocks count once per request); 0 disables",
        ),
    ] = 0.0
    waiting: int = 0
    """A worker is saturated above this many requests in its engine's own queue; 0 disables."""


class QueueLimits(NamedTuple):
    """Bounds of one router's queue.

    A prompt with more tokens than a bound allows may wait if it is the only one.
    """

    requests: Annotated[
        int, Meta(ge=0, description="maximum queued requests per router; beyond it clients get 429 or 503")
    ] = 4_096
    tokens: int = 33_554_432
    """Maximum queued prompt tokens per router."""
    tenant_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of both maxima that one tenant may use (the credential's, else x-headwater-tenant, else a digest of the API key)",
        ),
    ] = 0.5
    wait_s: Annotated[float, Meta(gt=0, description="maximum time a request may be queued, in seconds")] = (
        120.0
    )
    order: Annotated[
        Order,
        Meta(
            description="order within one tenant: first come first served, or fewest uncached prompt tokens first"
        ),
    ] = "fcfs"
    ageing_tokens_s: float = 4_096.0
    """Aging rate for shortest_uncached, tokens/s: a request with U uncached tokens waits at most U / rate seconds before it is served in arrival order."""


class QueueSettings(NamedTuple):
    """Saturation limits of the workers, and bounds of the queue."""

    busy: BusyLimits = BusyLimits()
    limits: QueueLimits = QueueLimits()


TENANTS_REMEMBERED_MAX: Final = 1_024
"""Tenants without queued queries whose account is kept. Beyond, the one with the fewest served tokens is dropped."""

PlacementKey = Constraints
"""Queries with equal constraints can be placed on the same workers."""


class QueuedQuery(NamedTuple):
    """A query in the queue since `arrived_s`.

    `rank` orders it within its tenant. It must reach a worker by `until_s`; there, its first token takes `serve_s`.
    """

    rank: float
    number: int
    query: RouteQuery
    arrived_s: float
    until_s: float
    serve_s: float

    @property
    def key(self) -> PlacementKey:
        """Queries of one key can be placed on the same workers."""
        return self.query.constraints

    @property
    def tokens(self) -> int:
        """What it counts for in bounds and accounts."""
        return max(1, self.query.prompt_tokens)


class Tenant:
    """Queries of one tenant and priority. `served` counts the prompt tokens it was given, see `PriorityClass`."""

    def __init__(self, served: int) -> None:
        self.served = served
        self.tokens = 0
        self._lines: dict[PlacementKey, list[QueuedQuery]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def enqueue(self, queued: QueuedQuery) -> None:
        """Insert into its line, by rank and then by arrival."""
        insort(self._lines.setdefault(queued.key, []), queued, key=_rank_of)
        self.tokens += queued.tokens

    def remove(self, queued: QueuedQuery) -> None:
        """Take out of its line."""
        line = self._lines[queued.key]
        del line[bisect_left(line, _rank_of(queued), key=_rank_of)]
        if not line:
            del self._lines[queued.key]
        self.tokens -= queued.tokens

    def next_query(self, blocked: Set[PlacementKey]) -> QueuedQuery | None:
        """The first query whose key is not blocked."""
        heads = [line[0] for key, line in self._lines.items() if key not in blocked]
        return min(heads, key=_rank_of, default=None)


class PriorityClass:
    """All queued queries of one priority. The tenant with the fewest served prompt tokens is next.

    Two tenants that always have queries queued are thus served the same number of tokens, within one prompt. A tenant that is
    new, or returns, starts at the lowest account of those present: absence earns no credit.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._absent: dict[str, int] = {}

    def enqueue(self, queued: QueuedQuery) -> None:
        """Queue a query."""
        name = queued.query.flow.tenant
        tenant = self.tenants.get(name)
        if tenant is None:
            least = min((present.served for present in self.tenants.values()), default=0)
            tenant = self.tenants[name] = Tenant(max(least, self._absent.pop(name, 0)))
        tenant.enqueue(queued)

    def remove(self, queued: QueuedQuery, *, served: bool) -> None:
        """Remove a query; if it was `served`, its tenant's account is charged."""
        name = queued.query.flow.tenant
        tenant = self.tenants[name]
        tenant.remove(queued)
        if served:
            tenant.served += queued.tokens
        if not tenant:
            del self.tenants[name]
            self._absent[name] = tenant.served
            self._drop_accounts()

    def next_query(self, blocked: Set[PlacementKey]) -> QueuedQuery | None:
        """The next query whose key is not blocked."""
        chosen: QueuedQuery | None = None
        least = 0
        for tenant in self.tenants.values():
            if chosen is None or tenant.served < least:
                head = tenant.next_query(blocked)
                if head is not None:
                    chosen, least = head, tenant.served
        return chosen

    def tokens_ahead_of(self, query: RouteQuery) -> int:
        """Tokens served before a query that arrives now: from each other tenant, at most as many as from its own."""
        name = query.flow.tenant
        own_tokens = self.tenants[name].tokens if name in self.tenants else 0
        until = own_tokens + query.prompt_tokens
        return own_tokens + sum(
            min(tenant.tokens, until) for other, tenant in self.tenants.items() if other != name
        )

    def _drop_accounts(self) -> None:
        """A tenant with no more than the lowest account of those present loses nothing when its account is dropped."""
        least = min((tenant.served for tenant in self.tenants.values()), default=0)
        if len(self._absent) > TENANTS_REMEMBERED_MAX:
            self._absent = {name: served for name, served in self._absent.items() if served > least}
        while len(self._absent) > TENANTS_REMEMBERED_MAX:
            del self._absent[min(self._absent, key=lambda name: self._absent[name])]


def _rank_of(queued: QueuedQuery) -> tuple[float, int]:
    return queued.rank, queued.number


def by_priority(classes: dict[int, PriorityClass]) -> Iterator[PriorityClass]:
    """The classes in the order in which they are served: lower priorities first."""
    return (classes[priority] for priority in sorted(classes))


MEMORY_S: Final = 10.0
"""Time constant: what happened this long ago has 1/e of the weight of what happens now."""

KNOWN_AFTER_S: Final = 1.0
"""The shortest observation; with less the rate is unknown: one served query would be extrapolated to any rate."""


class DrainRate:
    """Tokens and seconds decay at the same rate, so their ratio is the recent rate. `now_s` must not go back."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at_s = 0.0

    def advance(self, now_s: float, *, waiting: bool) -> None:
        """Time has passed, during which the queue was not empty (`waiting`) or was."""
        passed_s = max(0.0, now_s - self._at_s)
        decay = exp(-passed_s / MEMORY_S)
        self._tokens *= decay
        # The integral of the decaying weight. While the queue is empty both sums only decay, until the rate is unknown.
        self._seconds = self._seconds * decay + (MEMORY_S * (1.0 - decay) if waiting else 0.0)
        self._at_s = max(now_s, self._at_s)

    def count_served(self, tokens: int) -> None:
        """Count tokens of a query that left the queue for a worker."""
        self._tokens += tokens

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0.0 while unknown."""
        return self._tokens / self._seconds if self._seconds >= KNOWN_AFTER_S else 0.0


Reason = Literal["tenant", "full", "displaced", "deadline", "waited"]

RETRY_UNKNOWN_S: Final = 5.0
"""`Retry-After` while the queue's drain rate is unknown."""

RETRY_S_MIN, RETRY_S_MAX = 1.0, 120.0


class Rejection(NamedTuple):
    """A refusal and, for the metrics, its kind."""

    reason: Reason
    refused: RouteRefused


class Admitted(NamedTuple):
    """A query that is queued, and those that it displaced, each with its refusal."""

    queued: QueuedQuery
    displaced: list[tuple[QueuedQuery, Rejection]]


class WaitingQueue:
    """The queue of one router."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.tokens = 0
        self._queries: dict[str, QueuedQuery] = {}
        self._classes: dict[int, PriorityClass] = {}
        self._keys: dict[PlacementKey, int] = {}
        self._usage: dict[str, tuple[int, int]] = {}
        self._rate = DrainRate()
        self._number = 0

    def __len__(self) -> int:
        return len(self._queries)

    def __contains__(self, request: str) -> bool:
        return request in self._queries

    def queries(self) -> list[QueuedQuery]:
        """Everything queued, in order of arrival."""
        return list(self._queries.values())

    def has_key(self, key: PlacementKey) -> bool:
        """Is a query with these constraints queued?"""
        return key in self._keys

    def admit(
        self, query: RouteQuery, now_s: float, *, uncached_tokens: int = 0, serve_s: float = 0.0
    ) -> Admitted | Rejection:
        """Queue a query if that is possible. A query that is queued already keeps its place.

        `uncached_tokens` of its prompt must be computed. On a worker, its first token takes `serve_s`.
        """
        if query.request in self._queries:
            return Admitted(self._queries[query.request], [])
        self._rate.advance(now_s, waiting=bool(self._queries))
        room = self._find_room(query)
        if isinstance(room, Rejection):
            return room
        rejected = self._check_deadline(query, serve_s)
        if rejected is not None:
            return rejected
        displaced = []
        for queued in room:
            self._remove(queued, served=False)
            reason = "the queue is full, and a more urgent request took its place"
            displaced.append((queued, self._reject("displaced", queued.query, reason, 503)))
        deadline_ms = query.flow.deadline_ms
        until_s = now_s + deadline_ms / 1_000.0 - serve_s if deadline_ms else float("inf")
        self._number += 1
        rank = 0.0
        if self.limits.order == "shortest_uncached":
            # All queries age at one rate, so their relative order never changes and the rank can be fixed now.
            rank = uncached_tokens + self.limits.ageing_tokens_s * now_s
        queued = QueuedQuery(rank, self._number, query, now_s, until_s, serve_s)
        self._queries[query.request] = queued
        self._classes.setdefault(query.flow.priority, PriorityClass()).enqueue(queued)
        self._count(queued, 1)
        return Admitted(queued, displaced)

    def next_query(self, blocked: Set[PlacementKey] = frozenset()) -> QueuedQuery | None:
        """The next query to serve whose key is not `blocked`."""
        if self._keys.keys() <= blocked:
            return None
        for priority_class in by_priority(self._classes):
            head = priority_class.next_query(blocked)
            if head is not None:
                return head
        return None

    def serve(self, queued: QueuedQuery, now_s: float) -> None:
        """Remove a query that gets a worker; its tenant's account is charged."""
        self._rate.advance(now_s, waiting=True)
        self._rate.count_served(queued.tokens)
        self._remove(queued, served=True)

    def remove(self, request: str, now_s: float) -> QueuedQuery | None:
        """Remove a query that is not served. None if it is not queued."""
        queued = self._queries.get(request)
        if queued is not None:
            self._rate.advance(now_s, waiting=True)
            self._remove(queued, served=False)
        return queued

    def find_expired(self, now_s: float) -> list[tuple[QueuedQuery, Rejection]]:
        """Queries whose deadline can no longer be met, or that reached the maximum time. They stay queued."""
        checks = ((queued, self._check_expired(queued, now_s)) for queued in self._queries.values())
        return [(queued, rejected) for queued, rejected in checks if rejected is not None]

    def expected_wait_s(self, query: RouteQuery) -> float:
        """Estimated time in the queue of a query that arrives now; 0.0 while the drain rate is unknown."""
        rate = self._rate.tokens_s
        return self._tokens_ahead_of(query) / rate if rate else 0.0

    def retry_after_s(self, query: RouteQuery) -> float:
        """Return when a refused query should be sent again: when it would have been served."""
        rate = self._rate.tokens_s
        wait_s = self._tokens_ahead_of(query) / rate if rate else RETRY_UNKNOWN_S
        return min(max(wait_s, RETRY_S_MIN), RETRY_S_MAX)

    def _tokens_ahead_of(self, query: RouteQuery) -> int:
        tokens = 0
        for priority, queued in self._classes.items():
            if priority < query.flow.priority:
                tokens += sum(tenant.tokens for tenant in queued.tenants.values())
            elif priority == query.flow.priority:
                tokens += queued.tokens_ahead_of(query)
        return tokens

    def _find_room(self, query: RouteQuery) -> "list[QueuedQuery] | Rejection":
        """The queries that leave so that this one fits: the least urgent first, and of those the latest; or why it does not fit."""
        limits, flow = self.limits, query.flow
        less_urgent = sorted(
            (queued for queued in self._queries.values() if queued.query.flow.priority > flow.priority),
            key=lambda queued: (queued.query.flow.priority, queued.number),
            reverse=True,
        )
        room = _Room(len(self), self.tokens, *self._usage.get(flow.tenant, (0, 0)), flow.tenant)
        tokens, share = max(1, query.prompt_tokens), limits.tenant_share

        # A tenant with nothing queued, and an empty queue, take a query of any size.
        def share_is_used() -> bool:
            requests, held = room.own_requests, room.own_tokens
            return bool(requests) and (
                requests + 1 > share * limits.requests or held + tokens > share * limits.tokens
            )

        def is_full() -> bool:
            return room.requests + 1 > limits.requests or (
                room.requests > 0 and room.tokens + tokens > limits.tokens
            )

        while share_is_used():
            evicted = next(
                (queued for queued in less_urgent if queued.query.flow.tenant == flow.tenant), None
            )
            if evicted is None and is_full() and not less_urgent:
                break
            if evicted is None:
                waiting = self._usage[flow.tenant][0]
                reason = f"this tenant has used its share of the queue: {waiting} requests wait"
                return self._reject("tenant", query, reason, 429)
            less_urgent.remove(evicted)
            room.leave(evicted)
        while is_full():
            if not less_urgent:
                return self._reject("full", query, f"the queue is full: {len(self)} requests wait", 503)
            room.leave(less_urgent.pop(0))
        return room.leaving

    def _check_deadline(self, query: RouteQuery, serve_s: float) -> Rejection | None:
        expected_s = self.expected_wait_s(query)
        deadline_ms = query.flow.deadline_ms
        if not deadline_ms or expected_s + serve_s <= deadline_ms / 1_000.0:
            return None
        return self.reject_deadline(query, expected_s, serve_s)

    def _check_expired(self, queued: QueuedQuery, now_s: float) -> Rejection | None:
        if now_s > queued.until_s:
            return self.reject_deadline(queued.query, 0.0, queued.serve_s, now_s - queued.arrived_s)
        if now_s - queued.arrived_s >= self.limits.wait_s:
            reason = f"every worker was busy for {self.limits.wait_s:g} s"
            return self._reject("waited", queued.query, reason, 503)
        return None

    def reject_deadline(
        self, query: RouteQuery, expected_s: float, serve_s: float, waited_s: float = 0.0
    ) -> Rejection:
        """The refusal of a query whose deadline for the first token cannot be met."""
        spent = ", ".join(
            f"{seconds:.1f} s {phase}"
            for seconds, phase in (
                (waited_s, "already queued"),
                (expected_s, "expected in the queue"),
                (serve_s, "for its prompt"),
            )
            if seconds > 0.0
        )
        deadline_ms = query.flow.deadline_ms
        reason = f"the deadline of {deadline_ms} ms for the first token cannot be met ({spent})"
        return self._reject("deadline", query, reason, 503)

    def _reject(self, reason: Reason, query: RouteQuery, text: str, status: int) -> Rejection:
        code = {"tenant": "rate_limit_exceeded", "deadline": "deadline_exceeded"}.get(reason, "overloaded")
        return Rejection(reason, RouteRefused(text, self.retry_after_s(query), status, True, code))

    def _remove(self, queued: QueuedQuery, *, served: bool) -> None:
        del self._queries[queued.query.request]
        priority = queued.query.flow.priority
        priority_class = self._classes[priority]
        priority_class.remove(queued, served=served)
        if not priority_class.tenants:
            # With no tenant left there is nothing to be fair about: accounts start again at zero.
            del self._classes[priority]
        self._count(queued, -1)

    def _count(self, queued: QueuedQuery, sign: int) -> None:
        tenant = queued.query.flow.tenant
        requests, tokens = self._usage.get(tenant, (0, 0))
        self._usage[tenant] = (requests + sign, tokens + sign * queued.tokens)
        if not self._usage[tenant][0]:
            del self._usage[tenant]
        self._keys[queued.key] = self._keys.get(queued.key, 0) + sign
        if not self._keys[queued.key]:
            del self._keys[queued.key]
        self.tokens += sign * queued.tokens


class _Room:
    """What the queue, and one tenant's part of it, holds without the queries that are `leaving`."""

    def __init__(self, requests: int, tokens: int, own_requests: int, own_tokens: int, tenant: str) -> None:
        self.requests, self.tokens = requests, tokens
        self.own_requests, self.own_tokens = own_requests, own_tokens
        self.leaving: list[QueuedQuery] = []
        self._tenant = tenant

    def leave(self, queued: QueuedQuery) -> None:
        """This query is to leave."""
        self.leaving.append(queued)
        self.requests, self.tokens = self.requests - 1, self.tokens - queued.tokens
        if queued.query.flow.tenant == self._tenant:
            self.own_requests, self.own_tokens = self.own_requests - 1, self.own_tokens - queued.tokens


# Bursts: the order in which queries that arrived together are decided, and answered.

BURST_MAX: Final = 64
"""Queries ordered as one batch; those beyond keep their order of arrival. Ordering decides each query once more."""

Preview = Callable[[RouteQuery], Decision | RouteRefused | None]
"""Decides a query on the present state and changes nothing; None for one that is decided already."""


def order_by_regret(queries: Sequence[RouteQuery], preview: Preview) -> list[int]:
    """Indices of `queries` in the order in which to decide them.

    Equal regrets keep the order of arrival, and so do all queries under policies that ignore cost.
    """
    if len(queries) < 2:
        return list(range(len(queries)))
    count = min(len(queries), BURST_MAX)
    regrets = [regret(preview(query)) for query in queries[:count]]
    order = sorted(range(count), key=lambda index: -regrets[index])
    return [*order, *range(count, len(queries))]


def order_by_prompt(replies: Sequence[RouteReply]) -> list[int]:
    """Indices of replies in the order in which to send them: by the time that the prompt takes on its worker.

    Those without such an estimate come first. Equal ones keep their order, and so do all under policies that ignore cost.
    """
    return sorted(range(len(replies)), key=lambda index: _prompt_ms(replies[index]))


def _prompt_ms(reply: RouteReply) -> float:
    if not isinstance(reply, Decision) or reply.preferences.policy != "kv":
        return 0.0
    return reply.chosen.prefill_ms


def regret(decision: Decision | RouteRefused | None) -> float:
    """Cost of the second best worker above the best, in the unit of scores; infinite if there is no second."""
    if not isinstance(decision, Decision) or decision.preferences.policy != "kv":
        return 0.0
    scores = sorted(candidate.score for candidate in decision.candidates)
    return scores[1] - scores[0] if len(scores) > 1 else math.inf
