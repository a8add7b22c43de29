"""The bounded mailbox: order, bound, policy, close."""

import asyncio

import pytest

from headwater.actors.mailbox import Mailbox, MailboxClosed
from tests.unit.clock import running, settle


async def test_items_come_out_in_the_order_they_went_in() -> None:
    """First in, first out."""
    box: Mailbox[int] = Mailbox(10)
    assert all(box.put(number) for number in range(10))
    assert [await box.get() for _ in range(10)] == list(range(10))
    assert len(box) == 0


async def test_a_full_mailbox_refuses_and_tells_the_sender() -> None:
    """Under `refuse` the sender hears of it, the count rises, and nothing that is queued is lost."""
    box: Mailbox[int] = Mailbox(2, "refuse")
    assert [box.put(number) for number in range(4)] == [True, True, False, False]
    assert (box.refused, box.dropped, len(box)) == (2, 0, 2)
    assert [await box.get(), await box.get()] == [0, 1]
    assert box.put(4), "there is room again"


async def test_a_full_mailbox_drops_its_oldest_and_counts_it() -> None:
    """Under `drop_oldest` the newest are kept."""
    box: Mailbox[int] = Mailbox(2, "drop_oldest")
    assert all(box.put(number) for number in range(5))
    assert (box.refused, box.dropped, len(box)) == (0, 3, 2)
    assert [await box.get(), await box.get()] == [3, 4]


async def test_a_reader_waits_for_the_first_item() -> None:
    """`get` on an empty mailbox suspends until `put`."""
    box: Mailbox[str] = Mailbox(1)
    async with running(box.get()) as reader:
        await settle()
        assert not reader.done()
        box.put("late")
        assert await reader == "late"


async def test_every_waiting_reader_gets_one_item() -> None:
    """Readers never get the same item, and none is left asleep beside a full mailbox."""
    box: Mailbox[int] = Mailbox(8)
    readers = [asyncio.create_task(box.get()) for _ in range(3)]
    await settle()
    for number in range(3):
        box.put(number)
    assert sorted(await asyncio.gather(*readers)) == [0, 1, 2]


async def test_a_cancelled_reader_takes_no_item_with_it() -> None:
    """An item that came after a reader was cancelled is there for the next one."""
    box: Mailbox[int] = Mailbox(1)
    async with running(box.get()):
        await settle()
    box.put(7)
    assert await box.get() == 7


async def test_a_closed_mailbox_hands_out_what_is_queued_and_then_ends() -> None:
    """A stopping actor can answer everything it was asked, and is asked nothing more."""
    box: Mailbox[int] = Mailbox(3)
    box.put(1)
    box.put(2)
    box.close()
    assert not box.put(3)
    assert box.refused == 1
    assert [await box.get(), await box.get()] == [1, 2]
    with pytest.raises(MailboxClosed):
        await box.get()


async def test_closing_wakes_a_waiting_reader() -> None:
    """Nobody waits for ever on a mailbox that takes nothing."""
    box: Mailbox[int] = Mailbox(1)
    async with running(box.get()) as reader:
        await settle()
        box.close()
        with pytest.raises(MailboxClosed):
            await reader


def test_a_mailbox_without_room_is_refused() -> None:
    """A bound below one is a mistake in the code, told at once."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Mailbox[int](0)
