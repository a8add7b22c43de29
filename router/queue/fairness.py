"""The order of queued queries: by rank within a tenant, by served tokens between tenants. Pure.

A tenant's queries form one line for each `PlacementKey`. If the head of a line cannot be placed, no other query in it can.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Set
from typing import Final, NamedTuple

from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import RouteQuery

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

    def enqueue(self, one: QueuedQuery) -> None:
        """Insert into its line, by rank and then by arrival."""
        insort(self._lines.setdefault(one.key, []), one, key=_rank_of)
        self.tokens += one.tokens

    def remove(self, one: QueuedQuery) -> None:
        """Take out of its line."""
        line = self._lines[one.key]
        del line[bisect_left(line, _rank_of(one), key=_rank_of)]
        if not line:
            del self._lines[one.key]
        self.tokens -= one.tokens

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

    def enqueue(self, one: QueuedQuery) -> None:
        """Queue a query."""
        name = one.query.flow.tenant
        tenant = self.tenants.get(name)
        if tenant is None:
            least = min((present.served for present in self.tenants.values()), default=0)
            tenant = self.tenants[name] = Tenant(max(least, self._absent.pop(name, 0)))
        tenant.enqueue(one)

    def remove(self, one: QueuedQuery, *, served: bool) -> None:
        """Remove a query; if it was `served`, its tenant's account is charged."""
        name = one.query.flow.tenant
        tenant = self.tenants[name]
        tenant.remove(one)
        if served:
            tenant.served += one.tokens
        if not tenant:
            del self.tenants[name]
            self._absent[name] = tenant.served
            self._drop_accounts()

    def next_query(self, blocked: Set[PlacementKey]) -> QueuedQuery | None:
        """The next query whose key is not blocked."""
        found: QueuedQuery | None = None
        least = 0
        for tenant in self.tenants.values():
            if found is None or tenant.served < least:
                head = tenant.next_query(blocked)
                if head is not None:
                    found, least = head, tenant.served
        return found

    def tokens_ahead_of(self, query: RouteQuery) -> int:
        """Tokens served before a query that arrives now: from each other tenant, at most as many as from its own."""
        name = query.flow.tenant
        own = self.tenants[name].tokens if name in self.tenants else 0
        until = own + query.prompt_tokens
        return own + sum(min(tenant.tokens, until) for other, tenant in self.tenants.items() if other != name)

    def _drop_accounts(self) -> None:
        """A tenant with no more than the lowest account of those present loses nothing when its account is dropped."""
        least = min((tenant.served for tenant in self.tenants.values()), default=0)
        if len(self._absent) > TENANTS_REMEMBERED_MAX:
            self._absent = {name: served for name, served in self._absent.items() if served > least}
        while len(self._absent) > TENANTS_REMEMBERED_MAX:
            del self._absent[min(self._absent, key=lambda name: self._absent[name])]


def _rank_of(one: QueuedQuery) -> tuple[float, int]:
    return one.rank, one.number


def by_priority(classes: dict[int, PriorityClass]) -> Iterator[PriorityClass]:
    """The classes in the order in which they are served: lower priorities first."""
    return (classes[priority] for priority in sorted(classes))
