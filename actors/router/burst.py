"""Burst scheduling: queries that reach a router in one turn of the event loop are decided as a batch.

No query is delayed to form a batch: what one read of the connection brought is decided in the next turn, and answered once all of it is decided. Both
orders are those of `router.queue.burst_order`. That of the decisions costs as much again as deciding, so a router that falls behind decides in
order of arrival.
"""

import asyncio
from typing import Final, NamedTuple, Protocol

from headwater.actors.bus.port import Message
from headwater.router.queue.burst_order import BURST_MAX, order_by_prompt, order_by_regret
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused, RouteReply

BEHIND_TURNS: Final = 2
"""After this many turns in a row with more queries arriving, the router counts as behind."""


class QueryHandler(Protocol):
    """What decides and answers the queries of a burst."""

    def preview(self, query: RouteQuery) -> Decision | RouteRefused | None:
        """Decide a query and change nothing."""
        ...

    async def decide(self, query: RouteQuery) -> RouteReply:
        """Decide a query, or let it wait."""
        ...

    async def send(self, message: Message, query: RouteQuery, reply: RouteReply) -> None:
        """Reply to a query."""
        ...


class _Arrived(NamedTuple):
    message: Message
    query: RouteQuery


class BurstBatcher:
    """See the module."""

    def __init__(self, handler: QueryHandler) -> None:
        self._handler = handler
        self._arrived: list[_Arrived] = []
        self._any = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def enqueue(self, message: Message, query: RouteQuery) -> None:
        """Add a query to the next batch."""
        self._arrived.append(_Arrived(message, query))
        self._any.set()
        self._none.clear()

    async def run(self) -> None:
        """Answer queries. Does not return."""
        behind = 0
        while True:
            await self._any.wait()
            # One turn: by then everything that was read from the connection together with the first is here.
            await asyncio.sleep(0)
            batch, self._arrived = self._arrived[:BURST_MAX], self._arrived[BURST_MAX:]
            queries = [one.query for one in batch]
            ordered = behind < BEHIND_TURNS
            order = order_by_regret(queries, self._handler.preview) if ordered else range(len(batch))
            decided = [(batch[index], await self._handler.decide(queries[index])) for index in order]
            for index in order_by_prompt([reply for _, reply in decided]):
                arrived, reply = decided[index]
                await self._handler.send(arrived.message, arrived.query, reply)
            behind = behind + 1 if self._arrived else 0
            if not self._arrived:
                self._any.clear()
                self._none.set()

    async def wait_drained(self) -> None:
        """Return once every query is answered."""
        await self._none.wait()
