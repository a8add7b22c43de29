"""A table of leases that fails as a test says, and the lease of one worker in it."""

import pytest

from headwater.actors.runtime.lease import LeaseHandle, take
from headwater.actors.runtime.tables import decode_lease
from headwater.events.memory import MemoryTable
from headwater.events.ports import LogUnavailable
from headwater.events.table import TableEntry
from headwater.schemas.tables import Lease
from tests.support.worlds.clock import ManualClock

KEY = "worker.w1"


class FaultyTable(MemoryTable):
    """The memory table. `script` says how each next call ends: ok, unavailable, or with its answer lost."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.script: list[str] = []
        self.calls: list[str] = []

    def _fault(self, call: str) -> str:
        self.calls.append(call)
        fault = self.script.pop(0) if self.script else "ok"
        if fault == "unavailable":
            raise LogUnavailable("no answer")
        return fault

    async def create(self, key: str, value: bytes, *, ttl_s: int = 0) -> int | None:
        """See `Table.create`."""
        fault = self._fault("create")
        revision = await super().create(key, value, ttl_s=ttl_s)
        if fault == "answer lost":
            raise LogUnavailable("no answer")
        return revision

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: int = 0) -> int | None:
        """See `Table.update`."""
        fault = self._fault("update")
        result = await super().update(key, value, revision=revision, ttl_s=ttl_s)
        if fault == "answer lost":
            raise LogUnavailable("no answer")
        return result

    async def get(self, key: str) -> TableEntry | None:
        """See `Table.get`."""
        self._fault("get")
        return await super().get(key)


async def held(table: FaultyTable, ids: str = "i1") -> LeaseHandle:
    """The lease of worker w1, which is free."""
    return await take(table, "worker", "w1", table.clock, pool="p", ids=ids)


async def stored(table: MemoryTable) -> Lease:
    """The lease that is in the table."""
    found = await entry(table)
    assert found is not None
    lease = decode_lease(found)
    assert lease is not None
    return lease


async def entry(table: MemoryTable) -> TableEntry | None:
    """What is in the table, without counting as a call."""
    return await MemoryTable.get(table, KEY)


@pytest.fixture
def table(clock: ManualClock) -> FaultyTable:
    """A table that answers, until its script says otherwise."""
    return FaultyTable(clock)
