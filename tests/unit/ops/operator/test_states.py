"""States of a pool's log that commands fold on from."""

from headwater.events.memory import MemoryLog
from headwater.events.snapshot_store import SnapshotStore
from headwater.ops.operator.log_reading import first_state, folded, newest_state
from headwater.schemas.subjects import snapshot_name
from tests.support.worlds.told_fleet import told_fleet


async def test_the_newest_usable_snapshot_is_taken_and_the_others_are_told_of() -> None:
    """Up to a position; with one that is damaged an older one; none of another log of this name."""
    told = await told_fleet()
    store, heard = SnapshotStore(told.ports.blobs, "p"), list[str]()
    told.state.log = await told.log.identity()
    for worker in ("w1", "w2", "w3"):
        await told.join(worker)
        if worker == "w3":
            told.state.log = "another"
        await store.save(told.state.snapshot())
        # Else only the newest two stay.
        await store.bookmarks.put(worker, told.state.position)
    await told.join("w4")

    async def position_of(until: int) -> int | None:
        state = await newest_state(store, told.log, until, heard.append)
        return None if state is None else state.position

    assert await position_of(1) is None
    assert [await position_of(until) for until in (3, 4)] == [2, 4]
    assert not heard
    assert await position_of(8) == 4
    assert heard == ["the snapshot at position 6 is of another log that had this name before"]
    await told.ports.blobs.put(snapshot_name("p", 4), b"?")
    assert await position_of(5) == 2
    assert heard[1].startswith("the snapshot at position 4 is unreadable: ")
    assert sorted((await folded(told.log, store)).loads.workers) == ["w1", "w2", "w3", "w4"]
    assert isinstance(told.log, MemoryLog)
    told.log.purge(2)
    oldest = await first_state(store, told.log)
    assert oldest is not None
    assert oldest.position == 2
