"""The `Table` contract: compare-and-set, time to live, and watchers that miss nothing."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from headwater.events.table import KeySize, TableEntry
from tests.support.ports.tables import TTL_S, TableCase, Watcher, jetstream_table, memory_table, watching
from tests.support.ports.waiting import eventually
from tests.support.servers.nats import NatsServer

MANY = 600


@pytest.fixture
async def case(backend: NatsServer | None, unique: str) -> AsyncIterator[TableCase]:
    """An empty table."""
    async with memory_table() if backend is None else jetstream_table(backend, unique) as made:
        yield made


async def test_created_key_is_held_against_others(case: TableCase) -> None:
    """Only one of several creators gets a key; the others see who has it."""
    revision = await case.table.create("k", b"mine")
    assert revision is not None
    assert await case.other.create("k", b"theirs") is None
    assert await case.other.get("k") == TableEntry("k", b"mine", revision)


async def test_of_many_creators_at_once_one_wins(case: TableCase) -> None:
    """The winner's value is the one that is kept."""
    tables = (case.table, case.other)
    made = await asyncio.gather(*(tables[n % 2].create("k", f"v{n}".encode()) for n in range(12)))
    ((winner, revision),) = [(n, revision) for n, revision in enumerate(made) if revision is not None]
    assert await case.table.get("k") == TableEntry("k", f"v{winner}".encode(), revision)


async def test_absent_key_is_none(case: TableCase) -> None:
    """Absent is not an error."""
    assert await case.table.get("nobody") is None


async def test_revisions_rise_over_the_whole_table(case: TableCase) -> None:
    """A later write of any key has a higher revision, which is what makes it a fencing token."""
    revisions = [
        await case.table.create("a", b"1"),
        await case.other.create("b", b"1"),
        await case.table.put("a", b"2"),
        await case.table.put("c", b"1"),
    ]
    revisions.append(await case.other.update("b", b"2", revision=revisions[1] or 0))
    assert None not in revisions
    assert revisions == sorted(set(revisions), key=lambda revision: revision or 0)


async def test_sizes_of_the_keys_below_a_prefix(case: TableCase) -> None:
    """In the order of their last writes, without those that were deleted; of whole tokens, not of beginnings."""
    assert await case.table.sizes("a") == []
    first = await case.table.put("a.x", b"1")
    second = await case.table.put("a.y.z", bytes(1000))
    await case.table.put("a.gone", b"1")
    await case.table.put("ab.x", b"1")
    await case.table.put("a", b"1")
    await case.table.delete("a.gone")
    assert await case.other.sizes("a") == [KeySize("a.x", 1, first), KeySize("a.y.z", 1000, second)]
    third = await case.table.put("a.x", b"")
    assert await case.other.sizes("a") == [KeySize("a.y.z", 1000, second), KeySize("a.x", 0, third)]
    assert await case.other.sizes("a.y") == [KeySize("a.y.z", 1000, second)]


async def test_many_sizes(case: TableCase) -> None:
    """More than the server sends at once."""
    await asyncio.gather(*(case.table.put(f"m.{number}", bytes(number)) for number in range(MANY)))
    assert sorted(one.bytes for one in await case.other.sizes("m")) == list(range(MANY))


async def test_update_needs_the_present_revision(case: TableCase) -> None:
    """Whoever writes on an old revision loses, and nothing changes."""
    first = await case.table.create("k", b"1")
    assert first is not None
    second = await case.table.update("k", b"2", revision=first)
    assert second is not None
    assert second > first
    assert await case.other.update("k", b"late", revision=first) is None
    assert await case.other.get("k") == TableEntry("k", b"2", second)


async def test_update_of_an_absent_key_is_lost(case: TableCase) -> None:
    """A deleted key is not brought back by its last holder."""
    revision = await case.table.create("k", b"1")
    assert revision is not None
    await case.other.delete("k")
    assert await case.table.update("k", b"2", revision=revision) is None
    assert await case.table.update("never", b"2", revision=revision) is None
    assert await case.table.get("k") is None


async def test_put_replaces_whatever_is_there(case: TableCase) -> None:
    """Unconditional, and the holder of the old revision has lost it."""
    created = await case.table.create("k", b"1")
    assert created is not None
    revision = await case.other.put("k", b"2")
    assert await case.table.get("k") == TableEntry("k", b"2", revision)
    assert await case.table.update("k", b"3", revision=created) is None


async def test_deleted_key_can_be_created_again_at_a_higher_revision(case: TableCase) -> None:
    """Deleting twice, or what never was, is fine."""
    first = await case.table.create("k", b"1")
    assert first is not None
    for key in ("k", "k", "never"):
        await case.table.delete(key)
    assert await case.other.get("k") is None
    second = await case.other.create("k", b"2")
    assert second is not None
    assert second > first


@pytest.mark.ack_formats
async def test_watch_brings_the_present_first_and_whole(case: TableCase) -> None:
    """The first thing told is every present entry, without those that are gone; nothing follows it."""
    for number in range(MANY):
        await case.table.put(f"k{number}", str(number).encode())
    await case.table.delete("k7")
    async with watching(case.other) as watcher:
        assert watcher.first is not None
        assert {entry.key for entry in watcher.first} == {f"k{n}" for n in range(MANY) if n != 7}
        assert all(entry.value == entry.key[1:].encode() for entry in watcher.first)


@pytest.mark.parametrize("deleted", [False, True], ids=["new", "emptied"])
async def test_watch_of_an_empty_table_says_so_at_once(case: TableCase, deleted: bool) -> None:
    """An empty list is told, so that a watcher knows that it knows everything."""
    if deleted:
        await case.table.put("k", b"1")
        await case.table.delete("k")
    async with watching(case.other) as watcher:
        assert watcher.first == []
        await case.table.put("k", b"2")
        await eventually(lambda: watcher.state() == {"k": b"2"})


@pytest.mark.ack_formats
async def test_watcher_hears_every_change_in_order(case: TableCase) -> None:
    """Creation, update, deletion and creation again, with the revisions that the writers got."""
    async with watching(case.other) as watcher:
        first = await case.table.create("k", b"1")
        assert first is not None
        await eventually(lambda: len(watcher.entries) == 1)
        second = await case.table.update("k", b"2", revision=first)
        await eventually(lambda: len(watcher.entries) == 2)
        await case.table.delete("k")
        await eventually(lambda: len(watcher.entries) == 3)
        fourth = await case.table.create("k", b"4")
        await eventually(lambda: len(watcher.entries) == 4)
    assert [(entry.key, entry.value) for entry in watcher.entries] == [
        ("k", b"1"),
        ("k", b"2"),
        ("k", None),
        ("k", b"4"),
    ]
    revisions = [entry.revision for entry in watcher.entries]
    assert [revisions[0], revisions[1], revisions[3]] == [first, second, fourth]
    assert revisions == sorted(set(revisions))


@pytest.mark.ack_formats
async def test_watcher_is_right_however_fast_changes_come(case: TableCase) -> None:
    """Changes of one key that arrive together: the last one counts, and no number of deletions is too many."""
    table = case.table
    async with watching(case.other) as watcher:
        for number in range(40):
            came, went, stays = f"came{number}", f"went{number}", f"stays{number}"
            await asyncio.gather(table.create(came, b"1"), table.delete(came))
            await table.put(went, b"1")
            await asyncio.gather(table.delete(went), table.delete(went))
            await asyncio.gather(table.put(stays, b"1"), table.delete(stays), table.put(stays, b"3"))
        await table.put("end", b"")
        await eventually(lambda: "end" in watcher.state())
        assert watcher.state() == {"end": b""} | {f"stays{number}": b"3" for number in range(40)}
        for key in {entry.key for entry in watcher.entries}:
            revisions = [entry.revision for entry in watcher.entries if entry.key == key]
            assert revisions == sorted(revisions)


@pytest.mark.ack_formats
async def test_lapsed_key_is_gone_for_readers_watchers_and_its_holder(case: TableCase) -> None:
    """A time to live that runs out is seen by all, and the next creator gets a higher revision."""
    async with watching(case.other) as watcher:
        first = await case.table.create("k", b"1", ttl_s=TTL_S)
        assert first is not None
        assert await case.other.create("k", b"2", ttl_s=TTL_S) is None
        await case.table.put("stays", b"1")
        await case.passes(TTL_S)
        await eventually(lambda: watcher.told("k") == [b"1", None])
        assert await case.table.get("k") is None
        assert await case.table.update("k", b"1", revision=first, ttl_s=TTL_S) is None
        second = await case.other.create("k", b"2", ttl_s=TTL_S)
        assert second is not None
        assert second > first
        await eventually(lambda: watcher.told("k")[:3] == [b"1", None, b"2"])
        assert watcher.told("stays") == [b"1"]


async def test_renewed_key_lives_on(case: TableCase) -> None:
    """Each update starts the time to live anew: a holder that renews keeps the key, unbroken for watchers."""
    async with watching(case.other) as watcher:
        revision = await case.table.create("k", b"1", ttl_s=2 * TTL_S)
        for _ in range(6):
            await case.passes(TTL_S / 2)
            assert revision is not None
            revision = await case.table.update("k", b"1", revision=revision, ttl_s=2 * TTL_S)
        assert revision is not None
        assert await case.other.create("k", b"2", ttl_s=TTL_S) is None
        assert None not in watcher.told("k")


async def test_update_without_a_time_to_live_makes_a_key_stay(case: TableCase) -> None:
    """The last write decides whether an entry lapses."""
    revision = await case.table.create("k", b"1", ttl_s=TTL_S)
    assert revision is not None
    await case.table.put("k", b"2")
    await case.passes(2.5 * TTL_S)
    kept = await case.other.get("k")
    assert kept is not None
    assert kept.value == b"2"


async def test_keys_are_apart_and_values_are_bytes(case: TableCase) -> None:
    """Dots are part of a key; any bytes are a value, the empty ones too."""
    values = {"worker.w0": b"", "worker.w1": bytes(range(256)), "worker": b"x", "a-b_c": b"y" * 100_000}
    for key, value in values.items():
        await case.table.put(key, value)
    for key, value in values.items():
        entry = await case.other.get(key)
        assert entry is not None
        assert entry.value == value
    async with watching(case.other) as watcher:
        await eventually(lambda: watcher.state() == values)


async def test_a_replaced_table_holds_nothing_and_counts_anew(case: TableCase) -> None:
    """Every key is free, whoever held it; revisions begin again, so an old one names nothing in the new table."""
    held = await case.table.create("held", b"1")
    for number in range(20):
        await case.table.put(f"k{number}", b"1")
    renewed = await case.table.update("held", b"1", revision=held or 0)
    assert renewed is not None
    await case.replace()
    assert await case.table.get("held") is None
    assert await case.other.get("k7") is None
    assert await case.table.update("held", b"2", revision=renewed) is None
    created = await case.other.create("held", b"3")
    assert created is not None
    assert created < renewed
    assert await case.table.create("held", b"4") is None
    assert await case.table.get("held") == TableEntry("held", b"3", created)


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "held-again"])
@pytest.mark.ack_formats
async def test_a_watcher_is_told_that_a_replaced_table_lost_its_keys(case: TableCase, kept: bool) -> None:
    """And of everything that comes after, although its revisions are below those that were told before."""
    for number in range(20):
        await case.table.put("stays", str(number).encode())
    async with watching(case.other) as watcher:
        assert await case.table.create("goes", b"1") is not None
        await eventually(lambda: watcher.state() == {"stays": b"19", "goes": b"1"})
        await case.replace()
        if kept:
            # A holder may store its key again before the watcher has noticed anything.
            assert await case.table.create("stays", b"new") is not None
        await eventually(lambda: "goes" not in watcher.state())
        await eventually(lambda: watcher.state() == ({"stays": b"new"} if kept else {}))
        revision = await case.table.create("goes", b"2")
        assert revision is not None
        await eventually(lambda: watcher.state().get("goes") == b"2")
        assert watcher.entries[-1] == TableEntry("goes", b"2", revision)
        assert await case.table.update("goes", b"3", revision=revision) is not None
        await case.table.delete("stays")
        await eventually(lambda: watcher.state() == {"goes": b"3"})


async def test_a_table_may_be_replaced_again_and_again(case: TableCase) -> None:
    """A key that has the same value and the same revision each time is told for the last table as for the first."""
    async with watching(case.other) as watcher:
        for number in range(3):
            assert await case.table.create("same", b"1") is not None
            assert await case.table.create(f"k{number}", b"1") is not None
            await eventually(partial(_holds, watcher, {"same": b"1", f"k{number}": b"1"}))
            await case.replace()
            await eventually(partial(_holds, watcher, {}))


def _holds(watcher: Watcher, state: dict[str, bytes]) -> bool:
    return watcher.state() == state


async def test_a_watcher_knows_a_lost_table_from_a_deleted_key(case: TableCase) -> None:
    """What somebody deleted is to stay so; what was lost with its table its owner writes again."""
    for key in ("deleted", "lost", "held"):
        assert await case.table.create(key, b"1") is not None
    async with watching(case.other) as watcher:
        await case.table.delete("deleted")
        await eventually(partial(_holds, watcher, {"lost": b"1", "held": b"1"}))
        await case.replace()
        await case.table.create("held", b"1")
        await eventually(partial(_holds, watcher, {"held": b"1"}))
        gone = {entry.key: entry.lost for entry in watcher.entries if entry.value is None}
        assert (gone["deleted"], gone["lost"]) == (False, True)
        await case.table.delete("held")
        await eventually(partial(_holds, watcher, {}))
        assert not watcher.entries[-1].lost
