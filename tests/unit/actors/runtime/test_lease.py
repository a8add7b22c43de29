"""Leases: one holder at a time, an epoch that rises, renewal through lost answers, and loss as a result."""

from collections.abc import Sequence

import msgspec
import pytest

from headwater.actors.runtime.lease import RENEW_S, RETRY_S, TTL_S, LeaseHandle, take
from headwater.actors.runtime.tables import decode_lease
from headwater.events.memory import MemoryTable
from headwater.events.ports import LogUnavailable
from headwater.events.table import TableEntry
from headwater.schemas.tables import Lease
from tests.support.worlds.clock import ManualClock, running, settle

KEY = "worker.w1"


class FaultyTable(MemoryTable):
    """The memory table. `script` says how each next call ends: ok, unavailable, or with its answer lost."""

    def __init__(self, clock: ManualClock, script: Sequence[str] = ()) -> None:
        super().__init__(clock)
        self.script = list(script)
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


async def held(table: MemoryTable, clock: ManualClock, ids: str = "i1") -> LeaseHandle:
    """The lease of worker w1, which is free."""
    return await take(table, "worker", "w1", clock, pool="p", ids=ids)


async def entry(table: MemoryTable) -> TableEntry | None:
    """What is in the table, without counting as a call."""
    return await MemoryTable.get(table, KEY)


async def test_a_lease_says_what_it_stands_for() -> None:
    """Kind, name and pool for people and routers; which incarnation holds it for its owner."""
    clock = ManualClock()
    table = MemoryTable(clock)
    await held(table, clock)
    found = await entry(table)
    assert found is not None
    assert found.value is not None
    lease = msgspec.json.decode(found.value, type=Lease)
    assert (lease.kind, lease.name, lease.pool) == ("worker", "w1", "p")
    assert lease.pid > 0
    assert (lease.incarnation, lease.epoch) == ("i1", 1)


async def test_a_held_lease_outlives_its_time_and_keeps_its_epoch() -> None:
    """Renewed each second, it is never free; the revision moves on, the epoch does not."""
    clock = ManualClock()
    table = MemoryTable(clock)
    lease = await held(table, clock)
    first = await entry(table)
    async with running(lease.hold()) as holding:
        for _ in range(20 * TTL_S):
            await clock.advance(0.5)
            assert await entry(table) is not None
        assert not holding.done()
    found = await entry(table)
    assert found is not None
    assert first is not None
    assert found.revision > first.revision
    assert found.value == first.value, "watchers tell incarnations apart by the epoch in the value"
    assert lease.epoch == 1


async def test_a_lease_that_is_not_held_lapses() -> None:
    """Nobody has to say that its owner died."""
    clock = ManualClock()
    table = MemoryTable(clock)
    await held(table, clock)
    await clock.advance(TTL_S - 0.1)
    assert await entry(table) is not None
    await clock.advance(0.1)
    assert await entry(table) is None


async def test_a_second_life_waits_for_the_first_to_lapse_and_has_a_higher_epoch() -> None:
    """Two lives never hold the lease at once, and the later one fences the earlier."""
    clock = ManualClock()
    table = MemoryTable(clock)
    first = await held(table, clock)
    async with running(held(table, clock, "i2")) as waiting:
        await clock.advance(TTL_S - RETRY_S)
        assert not waiting.done()
        await clock.advance(2 * RETRY_S)
        second = await waiting
    assert second.epoch > first.epoch


async def test_a_held_lease_is_not_given_to_another() -> None:
    """However long the other waits, until it is released; then at once."""
    clock = ManualClock()
    table = MemoryTable(clock)
    first = await held(table, clock)
    async with running(first.hold()), running(held(table, clock, "i2")) as waiting:
        await clock.advance(10 * TTL_S)
        assert not waiting.done()
        await first.release()
        await clock.advance(RETRY_S)
        assert (await waiting).epoch > first.epoch


async def test_a_lease_that_another_holds_is_lost() -> None:
    """Losing it is a normal result: `hold` returns, within a renewal, and gives back nothing that is not its own."""
    clock = ManualClock()
    table = MemoryTable(clock)
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await clock.advance(2 * RENEW_S)
        await table.delete(KEY)
        await held(table, clock, "i2")
        await clock.advance(RENEW_S)
        assert "another incarnation" in await holding
    await lease.release()
    assert await entry(table) is not None, "another's lease is not given back"


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_lease_that_is_free_is_reclaimed_under_its_epoch(how: str) -> None:
    """It lapsed while the store was away, or went with its bucket: the holder has lost nothing by that."""
    clock = ManualClock()
    table = MemoryTable(clock)
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await clock.advance(2 * RENEW_S)
        if how == "deleted":
            await table.delete(KEY)
        else:
            table.replace()
        await clock.advance(RENEW_S)
        assert not holding.done()
    found = await entry(table)
    assert found is not None
    again = decode_lease(found)
    assert again is not None
    assert (again.epoch, again.incarnation) == (lease.epoch, "i1")


async def test_epochs_stay_ahead_of_the_log_when_the_bucket_is_new() -> None:
    """A new bucket counts its revisions from 1; the log holds the epochs of before."""
    clock = ManualClock()
    table = MemoryTable(clock)

    async def newest() -> int:
        return 500

    lease = await take(table, "worker", "w1", clock, newest=newest)
    assert lease.epoch == 501


async def test_epochs_rise_where_nothing_was_written() -> None:
    """Of an incarnation that took the lease and died before its first message the log holds nothing."""
    clock = ManualClock()
    table = MemoryTable(clock)
    epochs = []
    for _ in range(3):
        lease = await held(table, clock)
        epochs.append(lease.epoch)
        await lease.release()
    assert sorted(set(epochs)) == epochs


async def test_a_released_lease_is_not_reclaimed() -> None:
    """Also where the holder has not stopped renewing it yet."""
    clock = ManualClock()
    table = MemoryTable(clock)
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await lease.release()
        await clock.advance(2 * RENEW_S)
        assert not holding.done(), "its owner would take another one"
    assert await entry(table) is None


async def test_a_renewal_whose_answer_was_lost_does_not_lose_the_lease() -> None:
    """It was renewed; the next one finds a foreign revision with its own value, and goes on with that."""
    clock = ManualClock()
    table = FaultyTable(clock, ["ok", "ok", "ok", "answer lost"])
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await clock.advance(10 * TTL_S)
        assert not holding.done()
        assert await entry(table) is not None
    assert "get" in table.calls


async def test_a_short_outage_does_not_lose_the_lease() -> None:
    """An unanswered renewal is tried again before the lease lapses."""
    clock = ManualClock()
    table = FaultyTable(clock, ["ok", "ok", "ok", "unavailable"])
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await clock.advance(10 * TTL_S)
        assert not holding.done()
        assert await entry(table) is not None


@pytest.mark.parametrize("begins_s", [0.5, 0.9, 1.5])
async def test_an_outage_shorter_than_the_lease_does_not_lose_it(begins_s: float) -> None:
    """With the server away for half the lease's time, renewal is tried often enough to be in time."""
    clock = ManualClock()
    table = FaultyTable(clock)
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await clock.advance(begins_s)
        table.script = ["unavailable"] * 100
        await clock.advance(TTL_S / 2)
        table.script = []
        await clock.advance(10 * TTL_S)
        assert not holding.done()


async def test_an_outage_while_asking_who_holds_it_is_no_loss_either() -> None:
    """Only the server's answer decides: a question without an answer is asked again."""
    clock = ManualClock()
    table = FaultyTable(clock, ["ok", "ok", "answer lost", "ok", "unavailable"])
    lease = await held(table, clock)
    async with running(lease.hold()) as holding:
        await clock.advance(2 * RENEW_S)
        assert table.calls[:5] == ["create", "update", "update", "update", "get"]
        await clock.advance(10 * TTL_S)
        assert not holding.done()


@pytest.mark.parametrize("taken", [False, True])
async def test_after_a_long_outage_the_server_decides(taken: bool) -> None:
    """While it is away nothing is lost; when it is back, the lease is unless another holds it."""
    clock = ManualClock()
    table = FaultyTable(clock)
    lease = await held(table, clock)
    table.script = ["unavailable"] * 1000
    async with running(lease.hold()) as holding:
        await clock.advance(3 * TTL_S)
        assert not holding.done()
        table.script = []
        if taken:
            await held(table, clock, "i2")
        await clock.advance(RENEW_S)
        assert holding.done() == taken


@pytest.mark.parametrize(
    "script", [["unavailable", "answer lost"], ["ok", "answer lost"], ["ok", "unavailable"]]
)
async def test_taking_goes_on_through_an_outage_and_a_lost_answer(script: list[str]) -> None:
    """What was stored without our knowing is recognised, or lapses by itself; then it is taken."""
    clock = ManualClock()
    table = FaultyTable(clock, script)
    async with running(held(table, clock)) as taking:
        while not taking.done():
            await clock.advance(RETRY_S)
        lease = await taking
    found = await entry(table)
    assert found is not None
    again = decode_lease(found)
    assert again is not None
    assert again.epoch == lease.epoch > 0


async def test_releasing_is_quiet() -> None:
    """A lease that is gone already, or a server that is away, is no error on the way out."""
    clock = ManualClock()
    table = FaultyTable(clock)
    lease = await held(table, clock)
    await lease.release()
    assert await entry(table) is None
    await lease.release()
    table.script = ["unavailable"]
    await lease.release()
    await settle()
