"""The router's waiting room: queries that no worker may take now, in the order in which they are to be served. Pure.

Lower priorities first, strictly. Within one priority tenants share by prompt tokens (`waiting_lines.PriorityClass`).
Within one tenant either in order of arrival (`fcfs`), or those first of whose prompt least must be computed
(`shortest_uncached`): each second of waiting counts as `ageing_tokens_s` tokens less, so a query of which U tokens must
be computed is never overtaken by one that comes more than U / ageing_tokens_s seconds after it.

At the bounds of `QueueLimits` queries are refused: with 429 where their tenant holds its share, else with 503. All
times are the caller's, in seconds of a clock that does not go back.
"""

from collections.abc import Set
from typing import Final, Literal, NamedTuple

from headwater.router.drain_rate import DrainRate
from headwater.router.waiting_lines import PriorityClass, Shape, Waiting, in_turn, shape_of
from headwater.schemas.route import RouteQuery, RouteRefused

Order = Literal["fcfs", "shortest_uncached"]
Reason = Literal["tenant", "full", "deadline", "waited"]

RETRY_UNKNOWN_S: Final = 5.0
"""Told where the queue has not drained for long enough to know how fast it does."""

RETRY_S_MIN, RETRY_S_MAX = 1.0, 120.0


class QueueLimits(NamedTuple):
    """Bounds of the queue: requests, their prompt tokens, the share of both that one tenant may hold, and seconds.

    A prompt that is larger than a bound of tokens may wait where it is the only one.
    """

    requests: int = 4_096
    tokens: int = 33_554_432
    tenant_share: float = 0.5
    wait_s: float = 120.0
    order: Order = "fcfs"
    ageing_tokens_s: float = 4_096.0


class Turned(NamedTuple):
    """A refusal and, for the metrics, its kind."""

    reason: Reason
    refused: RouteRefused


class WaitingRoom:
    """See the module."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.tokens = 0
        self._all: dict[str, Waiting] = {}
        self._classes: dict[int, PriorityClass] = {}
        self._shapes: dict[Shape, int] = {}
        self._held: dict[str, tuple[int, int]] = {}
        self._rate = DrainRate()
        self._number = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: str) -> bool:
        return request in self._all

    def get(self, request: str) -> Waiting | None:
        """The query of this name, if it waits."""
        return self._all.get(request)

    def all(self) -> list[Waiting]:
        """Everything that waits, in order of arrival."""
        return list(self._all.values())

    def has_shape(self, shape: Shape) -> bool:
        """Does anything wait that needs the same of a worker?"""
        return shape in self._shapes

    def put(
        self, query: RouteQuery, now_s: float, *, uncached_tokens: int = 0, serve_s: float = 0.0
    ) -> Waiting | Turned:
        """Let a query wait, unless a bound or its deadline is against it.

        Of its prompt `uncached_tokens` must be computed; once a worker has it, its first token takes `serve_s`.
        """
        if query.request in self._all:
            return self._all[query.request]
        self._rate.advance(now_s, waiting=bool(self._all))
        turned = self._full(query) or self._too_late(query, now_s, serve_s)
        if turned is not None:
            return turned
        until_s = now_s + query.deadline_ms / 1_000.0 - serve_s if query.deadline_ms else float("inf")
        self._number += 1
        rank = 0.0
        if self.limits.order == "shortest_uncached":
            # All age alike, so the order of two never changes and the rank may be fixed now.
            rank = uncached_tokens + self.limits.ageing_tokens_s * now_s
        one = Waiting(rank, self._number, query, shape_of(query), now_s, until_s, serve_s)
        self._all[query.request] = one
        self._classes.setdefault(query.priority, PriorityClass()).add(one)
        self._count(one, 1)
        return one

    def first(self, blocked: Set[Shape] = frozenset()) -> Waiting | None:
        """Whose turn it is, of those whose shape is not `blocked`."""
        if self._shapes.keys() <= blocked:
            return None
        for waiting in in_turn(self._classes):
            one = waiting.first(blocked)
            if one is not None:
                return one
        return None

    def serve(self, one: Waiting, now_s: float) -> None:
        """It was its turn, and a worker is given it: its tenant's account is charged."""
        self._rate.advance(now_s, waiting=True)
        self._rate.served(one.tokens)
        self._remove(one, given=True)

    def drop(self, request: str, now_s: float) -> Waiting | None:
        """Nobody waits for it any more, or it was refused. None if it does not wait."""
        one = self._all.get(request)
        if one is not None:
            self._rate.advance(now_s, waiting=True)
            self._remove(one, given=False)
        return one

    def overdue(self, now_s: float) -> list[tuple[Waiting, Turned]]:
        """Those whose deadline can not be met any more, and those that waited for as long as one may. They stay."""
        return [(one, turned) for one in self._all.values() if (turned := self._late(one, now_s)) is not None]

    def expected_s(self, query: RouteQuery) -> float:
        """About how long a query that comes now would wait; 0.0 where the queue has not drained for long enough."""
        rate = self._rate.tokens_s
        return self._ahead(query) / rate if rate else 0.0

    def retry_after_s(self, query: RouteQuery) -> float:
        """When to come again: when it would have been its turn."""
        rate = self._rate.tokens_s
        wanted = self._ahead(query) / rate if rate else RETRY_UNKNOWN_S
        return min(max(wanted, RETRY_S_MIN), RETRY_S_MAX)

    def _ahead(self, query: RouteQuery) -> int:
        tokens = 0
        for priority, waiting in self._classes.items():
            if priority < query.priority:
                tokens += sum(tenant.tokens for tenant in waiting.tenants.values())
            elif priority == query.priority:
                tokens += waiting.ahead_of(query)
        return tokens

    def _full(self, query: RouteQuery) -> Turned | None:
        limits, tokens = self.limits, max(1, query.prompt_tokens)
        if len(self) + 1 > limits.requests or (self._all and self.tokens + tokens > limits.tokens):
            return self._turned("full", query, f"the queue is full: {len(self)} requests wait", 503)
        requests, held = self._held.get(query.tenant, (0, 0))
        share = limits.tenant_share
        if requests and (requests + 1 > share * limits.requests or held + tokens > share * limits.tokens):
            told = f"this tenant has used its share of the queue: {requests} requests wait"
            return self._turned("tenant", query, told, 429)
        return None

    def _too_late(self, query: RouteQuery, now_s: float, serve_s: float) -> Turned | None:
        expected_s = self.expected_s(query)
        if not query.deadline_ms or expected_s + serve_s <= query.deadline_ms / 1_000.0:
            return None
        return self.cannot_meet(query, expected_s, serve_s)

    def _late(self, one: Waiting, now_s: float) -> Turned | None:
        if now_s > one.until_s:
            return self.cannot_meet(one.query, 0.0, one.serve_s, now_s - one.arrived_s)
        if now_s - one.arrived_s >= self.limits.wait_s:
            told = f"every worker was busy for {self.limits.wait_s:g} s"
            return self._turned("waited", one.query, told, 503)
        return None

    def cannot_meet(
        self, query: RouteQuery, expected_s: float, serve_s: float, waited_s: float = 0.0
    ) -> Turned:
        """The refusal of a query whose deadline for the first token can not be met."""
        spent = ", ".join(
            f"{seconds:.1f} s {what}"
            for seconds, what in (
                (waited_s, "it has waited"),
                (expected_s, "it would wait"),
                (serve_s, "its prompt takes"),
            )
            if seconds > 0.0
        )
        told = f"the deadline of {query.deadline_ms} ms for the first token can not be met ({spent})"
        return self._turned("deadline", query, told, 503)

    def _turned(self, reason: Reason, query: RouteQuery, told: str, status: int) -> Turned:
        code = {"tenant": "rate_limit_exceeded", "deadline": "deadline_exceeded"}.get(reason, "overloaded")
        return Turned(reason, RouteRefused(told, self.retry_after_s(query), status, True, code))

    def _remove(self, one: Waiting, *, given: bool) -> None:
        del self._all[one.query.request]
        priority = one.query.priority
        waiting = self._classes[priority]
        waiting.remove(one, given=given)
        if not waiting.tenants:
            # With nobody left there is nothing to be fair about: accounts begin anew.
            del self._classes[priority]
        self._count(one, -1)

    def _count(self, one: Waiting, sign: int) -> None:
        tenant = one.query.tenant
        requests, tokens = self._held.get(tenant, (0, 0))
        self._held[tenant] = (requests + sign, tokens + sign * one.tokens)
        if not self._held[tenant][0]:
            del self._held[tenant]
        self._shapes[one.shape] = self._shapes.get(one.shape, 0) + sign
        if not self._shapes[one.shape]:
            del self._shapes[one.shape]
        self.tokens += sign * one.tokens
