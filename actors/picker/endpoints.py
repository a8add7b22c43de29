"""The endpoints of a fleet, from the leases of its workers, and its routers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from headwater.actors.runtime.tables import LeaseTable
from headwater.events.table import Table
from headwater.schemas.tables import Lease

BEGINS: Final = ("whole", "prefill")
"""What a worker must serve for a request to begin there."""

FOUND_MAX: Final = 256

Subset = frozenset[str] | None
"""The endpoints that a gateway allows, None for all."""


class _Found(NamedTuple):
    """The endpoints of a pool that are allowed, each once; and its incarnations that have none of them."""

    endpoints: tuple[str, ...]
    unreachable: tuple[str, ...]


class Endpoints:
    """Kept current by `run`; `known` is set once the present leases are read, and `on_pools_changed` called when a pool's workers change."""

    def __init__(self, leases: Table) -> None:
        self.known = asyncio.Event()
        self.on_pools_changed: Callable[[], None] = lambda: None
        self._table = LeaseTable(leases)
        self._workers: dict[str, Lease] = {}
        self._routers: dict[str, Lease] = {}
        self._turn = 0
        self._found: dict[tuple[str, Subset], _Found] = {}
        """What follows from the present leases, by pool and subset: requests ask more often than leases change."""

    async def run(self) -> None:
        """Follow the lease table. Does not return."""
        async for changes in self._table.watch():
            for kind, name, lease in changes:
                if kind == "worker" and lease != self._workers.get(name):
                    self._set(self._workers, name, lease)
                    self._found.clear()
                    self.on_pools_changed()
                elif kind == "router":
                    self._set(self._routers, name, lease)
            self.known.set()

    @staticmethod
    def _set(held: dict[str, Lease], name: str, lease: Lease | None) -> None:
        if lease is not None and lease.epoch:
            held[name] = lease
        else:
            held.pop(name, None)

    def has_workers(self, pool: str) -> bool:
        """Has a pool any worker that serves?"""
        return any(lease.pool == pool and lease.serves for lease in self._workers.values())

    def of(self, worker: str, subset: Subset = None) -> str:
        """The endpoint of a worker, "" if it has none or the subset lacks it."""
        lease = self._workers.get(worker)
        return lease.endpoint if lease is not None and _is_allowed(lease, subset) else ""

    def of_pool(self, pool: str, subset: Subset = None) -> tuple[str, ...]:
        """The endpoints at which a request to a pool may begin, each once; of any pool for "". Each call begins with the next one."""
        every = self._of(pool, subset).endpoints
        self._turn += 1
        first = self._turn % len(every) if every else 0
        return (*every[first:], *every[:first])

    def unreachable(self, pool: str, subset: Subset = None) -> tuple[str, ...]:
        """The incarnations of a pool's workers that a gateway cannot send to, as `Constraints.exclude` has them."""
        return self._of(pool, subset).unreachable

    def _of(self, pool: str, subset: Subset) -> "_Found":
        found = self._found.get((pool, subset))
        if found is None:
            begins = [
                (name, lease)
                for name, lease in sorted(self._workers.items())
                if pool in ("", lease.pool) and lease.serves in BEGINS
            ]
            allowed = [lease.endpoint for _, lease in begins if _is_allowed(lease, subset)]
            others = [f"{name}.{lease.epoch}" for name, lease in begins if not _is_allowed(lease, subset)]
            found = _Found(tuple(dict.fromkeys(allowed)), tuple(others))
            if len(self._found) >= FOUND_MAX:
                self._found.clear()
            self._found[pool, subset] = found
        return found

    def routers(self, pool: str) -> Sequence[tuple[str, int]]:
        """Names and epochs of a pool's routers."""
        return [(name, lease.epoch) for name, lease in self._routers.items() if lease.pool == pool]


def _is_allowed(lease: Lease, subset: Subset) -> bool:
    return bool(lease.endpoint) and (subset is None or lease.endpoint in subset)
