"""Queries a router where a request goes, and waits while the query is in the router's queue."""

import asyncio
from typing import Final

import msgspec
import structlog

from headwater.actors.bus.port import BusError, ReplyTimeout
from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tasks import Spawn
from headwater.schemas import subjects
from headwater.schemas.events.route import (
    Decision,
    RouteQuery,
    RouteQueued,
    RouteRefused,
    RouteReply,
    RouteWait,
)

ROUTE_TIMEOUT_S: Final = 2.0
"""Also for each long poll of a queued query: routers hold those for a shorter time."""

UNANSWERED_MAX: Final = 3
"""Messages in a row without a reply after which their receiver, a router or a worker, counts as lost."""

_encode = msgspec.msgpack.Encoder().encode
_route: msgspec.msgpack.Decoder[RouteReply] = msgspec.msgpack.Decoder(RouteReply)

_log = structlog.get_logger("headwater.edge.routing")


class RouterClient:
    """One per edge."""

    def __init__(self, ports: Ports, spawn: Spawn) -> None:
        self._ports = ports
        self._spawn = spawn

    async def route(self, pool: str, query: RouteQuery) -> Decision | RouteRefused:
        """Query a router, for as long as it keeps the query queued. Raises `BusError` if none replies.

        Cancelling the call removes the query from the router's queue.
        """
        subject = subjects.route_query(self._ports.ns, pool)
        reply = _route.decode(
            await self._ports.bus.request(subject, _encode(query), timeout_s=ROUTE_TIMEOUT_S)
        )
        if not isinstance(reply, RouteQueued):
            return reply
        subject = subjects.route_wait(self._ports.ns, pool, reply.router, reply.epoch)
        try:
            while isinstance(reply, RouteQueued):
                reply = await self._poll(subject, query.request)
        except (BusError, asyncio.CancelledError):
            self._leave_queue(subject, query.request)
            raise
        return reply

    def waited_s(self, began_s: float) -> float:
        """Of the time since `began_s`, what a query spent in the queue: bounded by the router, not by the edge."""
        return max(0.0, self._ports.clock.monotonic_s() - began_s - ROUTE_TIMEOUT_S)

    async def _poll(self, subject: str, request: str) -> RouteReply:
        """One reply; a poll or reply that was lost is sent again."""
        data = _encode(RouteWait(request))
        unanswered = 0
        while True:
            try:
                return _route.decode(await self._ports.bus.request(subject, data, timeout_s=ROUTE_TIMEOUT_S))
            except ReplyTimeout:
                unanswered += 1
                if unanswered >= UNANSWERED_MAX:
                    raise

    def _leave_queue(self, subject: str, request: str) -> None:
        try:
            self._spawn(self._publish_gone(subject, request), "gone")
        except RuntimeError:
            # The edge itself ends: the router notices that the polls stop.
            _log.debug("route_cancel_not_sent", request=request)

    async def _publish_gone(self, subject: str, request: str) -> None:
        try:
            await self._ports.bus.publish(subject, _encode(RouteWait(request, gone=True)))
        except BusError as error:
            _log.info("route_cancel_not_sent", request=request, reason=str(error))
