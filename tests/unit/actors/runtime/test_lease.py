"""Leases: one holder at a time, an epoch that rises, renewal through lost answers, and loss as a result."""

import pytest

from headwater.actors.runtime.lease import RENEW_S, RETRY_S, TTL_S, take
from tests.support.worlds.clock import running, settle
from tests.unit.actors.runtime.conftest import KEY, FaultyTable, entry, held, stored


async def test_a_lease_says_what_it_stands_for(table: FaultyTable) -> None:
    """Kind, name and pool for people and routers; which incarnation holds it for its owner."""
    await held(table)
    lease = await stored(table)
    assert (lease.kind, lease.name, lease.pool) == ("worker", "w1", "p")
    assert lease.pid > 0
    assert (lease.incarnation, lease.epoch) == ("i1", 1)


async def test_a_held_lease_outlives_its_time_and_keeps_its_epoch(table: FaultyTable) -> None:
    """Renewed each second, it is never free; the revision moves on, the epoch does not."""
    lease = await held(table)
    first = await entry(table)
    async with running(lease.hold()) as holding:
        for _ in range(20 * TTL_S):
            await table.clock.advance(0.5)
            assert await entry(table) is not None
        assert not holding.done()
    found = await entry(table)
    assert found is not None
    assert first is not None
    assert found.revision > first.revision
    assert found.value == first.value, "watchers tell incarnations apart by the epoch in the value"
    assert lease.epoch == 1


async def test_a_lease_that_is_not_held_lapses(table: FaultyTable) -> None:
    """Nobody has to say that its owner died."""
    await held(table)
    await table.clock.advance(TTL_S - 0.1)
    assert await entry(table) is not None
    await table.clock.advance(0.1)
    assert await entry(table) is None


async def test_a_second_life_waits_for_the_first_to_lapse_and_has_a_higher_epoch(table: FaultyTable) -> None:
    """Two lives never hold the lease at once, and the later one fences the earlier."""
    first = await held(table)
    async with running(held(table, "i2")) as waiting:
        await table.clock.advance(TTL_S - RETRY_S)
        assert not waiting.done()
        await table.clock.advance(2 * RETRY_S)
        second = await waiting
    assert second.epoch > first.epoch


async def test_a_held_lease_is_not_given_to_another(table: FaultyTable) -> None:
    """However long the other waits, until it is released; then at once."""
    first = await held(table)
    async with running(first.hold()), running(held(table, "i2")) as waiting:
        await table.clock.advance(10 * TTL_S)
        assert not waiting.done()
        await first.release()
        await table.clock.advance(RETRY_S)
        assert (await waiting).epoch > first.epoch


async def test_a_lease_that_another_holds_is_lost(table: FaultyTable) -> None:
    """Losing it is a normal result: `hold` returns, within a renewal, and gives back nothing that is not its own."""
    lease = await held(table)
    async with running(lease.hold()) as holding:
        await table.clock.advance(2 * RENEW_S)
        await table.delete(KEY)
        await held(table, "i2")
        await table.clock.advance(RENEW_S)
        assert "another incarnation" in await holding
    await lease.release()
    assert await entry(table) is not None, "another's lease is not given back"


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_lease_that_is_free_is_reclaimed_under_its_epoch(how: str, table: FaultyTable) -> None:
    """It lapsed while the store was away, or went with its bucket: the holder has lost nothing by that."""
    lease = await held(table)
    async with running(lease.hold()) as holding:
        await table.clock.advance(2 * RENEW_S)
        if how == "deleted":
            await table.delete(KEY)
        else:
            table.replace()
        await table.clock.advance(RENEW_S)
        assert not holding.done()
    again = await stored(table)
    assert (again.epoch, again.incarnation) == (lease.epoch, "i1")


async def test_epochs_stay_ahead_of_the_log_when_the_bucket_is_new(table: FaultyTable) -> None:
    """A new bucket counts its revisions from 1; the log holds the epochs of before."""

    async def newest() -> int:
        return 500

    lease = await take(table, "worker", "w1", table.clock, newest=newest)
    assert lease.epoch == 501


async def test_epochs_rise_where_nothing_was_written(table: FaultyTable) -> None:
    """Of an incarnation that took the lease and died before its first message the log holds nothing."""
    epochs = []
    for _ in range(3):
        lease = await held(table)
        epochs.append(lease.epoch)
        await lease.release()
    assert sorted(set(epochs)) == epochs


async def test_a_released_lease_is_not_reclaimed(table: FaultyTable) -> None:
    """Also where the holder has not stopped renewing it yet."""
    lease = await held(table)
    async with running(lease.hold()) as holding:
        await lease.release()
        await table.clock.advance(2 * RENEW_S)
        assert not holding.done(), "its owner would take another one"
    assert await entry(table) is None


@pytest.mark.parametrize(
    "script",
    [["ok", "answer lost"], ["ok", "unavailable"], ["answer lost", "ok", "unavailable"]],
    ids=["a lost answer", "a short outage", "an outage while asking who holds it"],
)
async def test_a_renewal_without_an_answer_does_not_lose_the_lease(
    table: FaultyTable, script: list[str]
) -> None:
    """It is tried again; if it was stored, the next one finds a foreign revision with its own value, and goes on with that."""
    lease = await held(table)
    table.script, table.calls = list(script), []
    async with running(lease.hold()) as holding:
        await table.clock.advance(10 * TTL_S)
        assert not holding.done()
        assert await entry(table) is not None
    assert not table.script
    assert ("get" in table.calls) == ("answer lost" in script), "only the server's answer says who holds it"


@pytest.mark.parametrize("begins_s", [0.5, 0.9, 1.5])
async def test_an_outage_shorter_than_the_lease_does_not_lose_it(begins_s: float, table: FaultyTable) -> None:
    """With the server away for half the lease's time, renewal is tried often enough to be in time."""
    lease = await held(table)
    async with running(lease.hold()) as holding:
        await table.clock.advance(begins_s)
        table.script = ["unavailable"] * 100
        await table.clock.advance(TTL_S / 2)
        table.script = []
        await table.clock.advance(10 * TTL_S)
        assert not holding.done()


@pytest.mark.parametrize("taken", [False, True])
async def test_after_a_long_outage_the_server_decides(taken: bool, table: FaultyTable) -> None:
    """While it is away nothing is lost; when it is back, the lease is unless another holds it."""
    lease = await held(table)
    table.script = ["unavailable"] * 1000
    async with running(lease.hold()) as holding:
        await table.clock.advance(3 * TTL_S)
        assert not holding.done()
        table.script = []
        if taken:
            await held(table, "i2")
        await table.clock.advance(RENEW_S)
        assert holding.done() == taken


@pytest.mark.parametrize(
    "script", [["unavailable", "answer lost"], ["ok", "answer lost"], ["ok", "unavailable"]]
)
async def test_taking_goes_on_through_an_outage_and_a_lost_answer(
    script: list[str], table: FaultyTable
) -> None:
    """What was stored without our knowing is recognised, or lapses by itself; then it is taken."""
    table.script = script
    async with running(held(table)) as taking:
        while not taking.done():
            await table.clock.advance(RETRY_S)
        lease = await taking
    again = await stored(table)
    assert again.epoch == lease.epoch > 0


async def test_releasing_is_quiet(table: FaultyTable) -> None:
    """A lease that is gone already, or a server that is away, is no error on the way out."""
    lease = await held(table)
    await lease.release()
    assert await entry(table) is None
    await lease.release()
    table.script = ["unavailable"]
    await lease.release()
    await settle()
