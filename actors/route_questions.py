"""Edges that ask after queries which wait at a router: their questions, and what they are told.

Subjects in
    hw.<ns>.wait.<pool>.<router>.<epoch>
A question is held for `HOLD_S` and answered as soon as its query has an outcome, so that an edge learns within its
usual time limit that a router is gone. An edge that did not ask for `ABANDONED_S` waits no more.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import structlog

from headwater.actors.bus_port import BusError, Message, Subscription
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.route import Decision, RouteQueued, RouteRefused, RouteReply, RouteWait

HOLD_S: Final = 1.0
"""Well below the time after which an edge gives up on an answer."""

ABANDONED_S: Final = 5.0
"""An edge asks for the third time within this, if its questions or their answers are lost."""

TOLD_MAX: Final = 4_096
"""Refusals remembered for edges that were between two questions."""

_encode = msgspec.msgpack.Encoder().encode
_wait = msgspec.msgpack.Decoder(RouteWait)

_log = structlog.get_logger("headwater.queue")


class Asked(Protocol):
    """Who knows what became of a query."""

    def made(self, request: str) -> Decision | None:
        """What was decided lately."""
        ...

    def void(self, decision: Decision) -> None:
        """Take back what nobody will act on."""
        ...

    def spawn(self, work: Any, name: str) -> object:
        """Run in the router's task group."""
        ...


class _Question(NamedTuple):
    reply: str
    until_s: float


class Questions:
    """See the module. `forget` is called with a query that nobody waits for, and why."""

    def __init__(
        self, world: World, name: str, pool: str, router: Asked, forget: Callable[[str, str], None]
    ) -> None:
        self._world = world
        self._name = name
        self._pool = pool
        self._router = router
        self._forget = forget
        self._epoch = 0
        self._subscription: Subscription | None = None
        self._heard: dict[str, float] = {}
        self._open: dict[str, _Question] = {}
        self._told: OrderedDict[str, RouteRefused] = OrderedDict()

    async def listen(self, epoch: int) -> None:
        """Take questions from now on."""
        self._epoch = epoch
        subject = subjects.route_wait(self._world.ns, self._pool, self._name, epoch)
        self._subscription = await self._world.bus.subscribe(subject, self._on_question)

    async def close(self) -> None:
        """Take none any more. Again is fine."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def expect(self, request: str) -> RouteQueued:
        """A query begins to wait: what its edge is told."""
        self._heard.setdefault(request, self._world.clock.monotonic_s())
        return RouteQueued(self._name, self._epoch)

    def answer(self, request: str, reply: Decision | RouteRefused | None) -> None:
        """A query waits no more. None: nobody is to be told."""
        self._heard.pop(request, None)
        question = self._open.pop(request, None)
        if question is not None and reply is not None:
            self._router.spawn(self._tell(question.reply, reply), "queue answers")
        elif isinstance(reply, RouteRefused):
            # A decision its router remembers.
            self._told[request] = reply
            if len(self._told) > TOLD_MAX:
                self._told.popitem(last=False)

    def look(self, now_s: float) -> None:
        """Time has passed: hold no question too long, and forget queries of edges that do not ask."""
        for request in [one for one, heard_s in self._heard.items() if now_s - heard_s > ABANDONED_S]:
            self._forget(request, "abandoned")
        for request in [one for one, question in self._open.items() if question.until_s <= now_s]:
            question = self._open.pop(request)
            still = RouteQueued(self._name, self._epoch)
            self._router.spawn(self._tell(question.reply, still), "queue answers")

    async def _on_question(self, message: Message) -> None:
        try:
            asked = _wait.decode(message.data)
        except msgspec.DecodeError as error:
            _log.warning("wait_unreadable", reason=str(error))
            return
        request, now_s = asked.request, self._world.clock.monotonic_s()
        made = self._router.made(request)
        if asked.gone:
            self._forget(request, "gone")
            if made is not None:
                self._router.void(made)
        elif request in self._heard:
            self._heard[request] = now_s
            self._open[request] = _Question(message.reply, now_s + HOLD_S)
        else:
            unknown = RouteRefused(f"router {self._name} does not know the query", 1.0)
            await self._tell(message.reply, made or self._told.get(request, unknown))

    async def _tell(self, subject: str, reply: RouteReply) -> None:
        if not subject:
            return
        try:
            await self._world.bus.publish(subject, _encode(reply))
        except BusError as error:
            # The edge asks again.
            _log.warning("queue_answer_not_sent", reason=str(error))
