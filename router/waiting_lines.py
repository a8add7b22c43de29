"""The order in which queries wait: within one tenant by rank, between tenants by what each was given. Pure.

A tenant's queries stand in one line for each `Shape`: what a query needs of a worker. Where one of a shape can not be
placed, no other of it can, so the line's first stands for all.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Set
from typing import Final, NamedTuple

from headwater.schemas.route import RouteQuery

TENANTS_REMEMBERED_MAX: Final = 1_024
"""Tenants with nothing waiting whose account is kept; beyond, the one that was given least is forgotten."""


class Shape(NamedTuple):
    """Everything in a query that says which workers may take it."""

    pinned: str
    exclude: tuple[str, ...]
    lora_name: str
    needs: tuple[str, ...]
    tier: str
    tolerates: tuple[str, ...]


def shape_of(query: RouteQuery) -> Shape:
    """The query's shape."""
    return Shape(query.pinned, query.exclude, query.lora_name, query.needs, query.tier, query.tolerates)


class Waiting(NamedTuple):
    """A query in the queue since `arrived_s`. By `until_s` it must be with a worker; `rank` is its place in its tenant."""

    rank: float
    number: int
    query: RouteQuery
    shape: Shape
    arrived_s: float
    until_s: float
    serve_s: float

    @property
    def tokens(self) -> int:
        """What it counts for."""
        return max(1, self.query.prompt_tokens)


class Tenant:
    """Queries of one tenant and priority. `given` counts the prompt tokens that it was given, see `PriorityClass`."""

    def __init__(self, given: int) -> None:
        self.given = given
        self.tokens = 0
        self._lines: dict[Shape, list[Waiting]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, one: Waiting) -> None:
        """Put into its line, by rank and then by arrival."""
        insort(self._lines.setdefault(one.shape, []), one, key=_place)
        self.tokens += one.tokens

    def remove(self, one: Waiting) -> None:
        """Take out of its line."""
        line = self._lines[one.shape]
        del line[bisect_left(line, _place(one), key=_place)]
        if not line:
            del self._lines[one.shape]
        self.tokens -= one.tokens

    def first(self, blocked: Set[Shape]) -> Waiting | None:
        """Whose turn it is among those that are not of a blocked shape."""
        heads = [line[0] for shape, line in self._lines.items() if shape not in blocked]
        return min(heads, key=_place, default=None)


class PriorityClass:
    """All that wait with one priority. The tenant that was given the least prompt tokens is next.

    So two tenants that both have something waiting all the time are given the same, but for one prompt. A tenant that
    comes new, or back, begins with what the least of those present was given: having been away is no credit.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._away: dict[str, int] = {}

    def add(self, one: Waiting) -> None:
        """Let a query wait."""
        name = one.query.tenant
        tenant = self.tenants.get(name)
        if tenant is None:
            least = min((present.given for present in self.tenants.values()), default=0)
            tenant = self.tenants[name] = Tenant(max(least, self._away.pop(name, 0)))
        tenant.add(one)

    def remove(self, one: Waiting, *, given: bool) -> None:
        """Let it wait no more; `given`: it was its turn."""
        name = one.query.tenant
        tenant = self.tenants[name]
        tenant.remove(one)
        if given:
            tenant.given += one.tokens
        if not tenant:
            del self.tenants[name]
            self._away[name] = tenant.given
            self._forget()

    def first(self, blocked: Set[Shape]) -> Waiting | None:
        """Whose turn it is among those that are not of a blocked shape."""
        next_one: Waiting | None = None
        least = 0
        for tenant in self.tenants.values():
            if next_one is None or tenant.given < least:
                head = tenant.first(blocked)
                if head is not None:
                    next_one, least = head, tenant.given
        return next_one

    def ahead_of(self, query: RouteQuery) -> int:
        """Tokens that are served before a query that comes now: of each tenant no more than its own is given."""
        own = self.tenants[query.tenant].tokens if query.tenant in self.tenants else 0
        until = own + query.prompt_tokens
        return own + sum(
            min(tenant.tokens, until) for name, tenant in self.tenants.items() if name != query.tenant
        )

    def _forget(self) -> None:
        """Whoever was given no more than the least of those present loses nothing by being forgotten."""
        least = min((tenant.given for tenant in self.tenants.values()), default=0)
        if len(self._away) > TENANTS_REMEMBERED_MAX:
            self._away = {name: given for name, given in self._away.items() if given > least}
        while len(self._away) > TENANTS_REMEMBERED_MAX:
            del self._away[min(self._away, key=lambda name: self._away[name])]


def _place(one: Waiting) -> tuple[float, int]:
    return one.rank, one.number


def in_turn(classes: dict[int, PriorityClass]) -> Iterator[PriorityClass]:
    """The classes, lower priorities first."""
    return (classes[priority] for priority in sorted(classes))
