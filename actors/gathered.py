"""Queries that reach a router in one turn of the event loop, decided together.

No query waits for others to come: what one read of the connection brought is decided in the next turn, in the order of
`router.together`. A burst of requests that an edge got at once comes so. That order costs as much again as deciding, so
a router that does not keep up decides in the order of arrival.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from headwater.actors.bus_port import Message
from headwater.router.together import TOGETHER_MAX, most_particular_first
from headwater.schemas.route import Decision, RouteQuery, RouteRefused

BEHIND_TURNS = 2
"""After so many turns in a row during which others came, the router does not keep up."""

Look = Callable[[RouteQuery], Decision | RouteRefused | None]
Answer = Callable[[Message, RouteQuery], Awaitable[None]]


class _Arrived(NamedTuple):
    message: Message
    query: RouteQuery


class Gathered:
    """See the module. `look` decides a query and changes nothing; `answer` decides it and says so to who asked."""

    def __init__(self, look: Look, answer: Answer) -> None:
        self._look = look
        self._answer = answer
        self._arrived: list[_Arrived] = []
        self._any = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    def put(self, message: Message, query: RouteQuery) -> None:
        """A query came."""
        self._arrived.append(_Arrived(message, query))
        self._any.set()
        self._none.clear()

    async def run(self) -> None:
        """Answer what comes, for ever."""
        behind = 0
        while True:
            await self._any.wait()
            # One turn: whatever was read from the connection with the first is here then.
            await asyncio.sleep(0)
            now, self._arrived = self._arrived[:TOGETHER_MAX], self._arrived[TOGETHER_MAX:]
            queries = [one.query for one in now]
            looks = behind < BEHIND_TURNS
            for place in most_particular_first(queries, self._look) if looks else range(len(now)):
                await self._answer(*now[place])
            behind = behind + 1 if self._arrived else 0
            if not self._arrived:
                self._any.clear()
                self._none.set()

    async def settled(self) -> None:
        """Wait until all that came is answered."""
        await self._none.wait()
