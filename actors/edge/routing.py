"""Asking a router where a request goes, and waiting where it lets the query wait."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
import structlog

from headwater.actors.bus_port import BusError, ReplyTimeout
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.route import Decision, RouteQuery, RouteQueued, RouteRefused, RouteReply, RouteWait

ROUTE_TIMEOUT_S: Final = 2.0
"""Also for each question after a query that waits: routers hold those for a shorter time."""

UNANSWERED_MAX: Final = 3
"""Questions in a row without an answer, after which the router is taken for lost, and the query with it."""

_encode = msgspec.msgpack.Encoder().encode
_route: msgspec.msgpack.Decoder[RouteReply] = msgspec.msgpack.Decoder(RouteReply)

_log = structlog.get_logger("headwater.edge.routing")


class Routing:
    """One for an edge."""

    def __init__(self, world: World, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._world = world
        self._spawn = spawn

    async def route(
        self, pool: str, query: RouteQuery, wanted: Callable[[], bool] = lambda: True
    ) -> Decision | RouteRefused:
        """Ask a router, for as long as it lets the query wait. Raises `BusError` when none answers.

        A query that is no longer `wanted`, or whose caller is cancelled, gives up its place.
        """
        subject = subjects.route_query(self._world.ns, pool)
        reply = await self._ask(subject, _encode(query))
        if not isinstance(reply, RouteQueued):
            return reply
        subject = subjects.route_wait(self._world.ns, pool, reply.router, reply.epoch)
        try:
            while wanted():
                reply = await self._ask_after(subject, query.request)
                if not isinstance(reply, RouteQueued):
                    return reply
        except (BusError, asyncio.CancelledError):
            self._give_up(subject, query.request)
            raise
        self._give_up(subject, query.request)
        return RouteRefused("nobody waits for it any more")

    def waited_s(self, began_s: float) -> float:
        """Of the time since then what a query spent waiting: a router bounds that, nobody else needs to."""
        return max(0.0, self._world.clock.monotonic_s() - began_s - ROUTE_TIMEOUT_S)

    async def _ask(self, subject: str, data: bytes) -> RouteReply:
        return _route.decode(await self._world.bus.request(subject, data, timeout_s=ROUTE_TIMEOUT_S))

    async def _ask_after(self, subject: str, request: str) -> RouteReply:
        """One answer; a question or answer that got lost on the way is asked again."""
        data = _encode(RouteWait(request))
        unanswered = 0
        while True:
            try:
                return await self._ask(subject, data)
            except ReplyTimeout:
                unanswered += 1
                if unanswered >= UNANSWERED_MAX:
                    raise

    def _give_up(self, subject: str, request: str) -> None:
        try:
            self._spawn(self._tell_gone(subject, request), "gone")
        except RuntimeError:
            # The edge itself ends: the router notices that nobody asks.
            _log.debug("gone_not_told", request=request)

    async def _tell_gone(self, subject: str, request: str) -> None:
        try:
            await self._world.bus.publish(subject, _encode(RouteWait(request, gone=True)))
        except BusError as error:
            _log.info("gone_not_told", request=request, reason=str(error))
