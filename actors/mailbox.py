"""A bounded mailbox: what an actor has not handled yet, with a stated policy at the bound."""

import asyncio
from collections import deque
from typing import Generic, Literal, TypeVar

ItemT = TypeVar("ItemT")

Policy = Literal["refuse", "drop_oldest"]


class Mailbox(Generic[ItemT]):
    """First in, first out, at most `bound` items.

    At the bound `put` refuses (the sender is told) or drops the oldest; both are counted. After `close`,
    `get` still hands out what is queued and then ends with `MailboxClosed`, so a stopping actor can answer
    everything it was asked.
    """

    def __init__(self, bound: int, policy: Policy = "refuse") -> None:
        if bound < 1:
            raise ValueError(f"a mailbox needs a bound of at least 1, got {bound}")
        self.bound = bound
        self.policy = policy
        self.refused = 0
        self.dropped = 0
        self._items: deque[ItemT] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ItemT) -> bool:
        """Queue an item; False if it was refused because the mailbox is full or closed."""
        if self._closed:
            self.refused += 1
            return False
        if len(self._items) >= self.bound:
            if self.policy == "refuse":
                self.refused += 1
                return False
            self._items.popleft()
            self.dropped += 1
        self._items.append(item)
        self._arrived.set()
        return True

    async def get(self) -> ItemT:
        """Wait for the oldest item. Raises `MailboxClosed` once closed and empty."""
        while not self._items:
            if self._closed:
                raise MailboxClosed
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()

    def close(self) -> None:
        """Take no more items."""
        self._closed = True
        self._arrived.set()


class MailboxClosed(Exception):
    """The mailbox is closed and everything in it was handed out."""
