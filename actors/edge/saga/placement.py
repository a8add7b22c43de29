"""The placement of what a request has workers do: queries to the router, and the search for a worker that answers a message.

Choices of a request, whose tokens are streamed, are placed by their saga. Prompts to pool, media to encode and files to generate are messages
that a worker answers as a whole: `MessagePlacement` finds their workers, by the same rules (`Placement`).
"""

from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

import structlog
from msgspec.structs import replace

from headwater.actors.bus import BusError, NoResponder
from headwater.actors.edge.saga.routing_hints import RoutingHints
from headwater.actors.edge.saga.saga import DEATHS_MAX
from headwater.actors.edge.saga.types import (
    MOVE_S_MAX,
    PLACE_S_MAX,
    AskRouter,
    Placement,
    RouteAnswer,
    Routed,
    RouterRefused,
    RouterUnanswered,
)
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.errors import ended_workers, overloaded, rejected
from headwater.schemas import hashing
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused
from headwater.schemas.messages.inference import Refused
from headwater.schemas.trace import NO_TRACE, TraceContext

T = TypeVar("T")

TRIES_MAX: Final = 2
"""Workers that are tried for a message that waits for none."""

_log = structlog.get_logger("headwater.edge")


class Addressed(NamedTuple):
    """Message `number` of a request, for one of the workers with what `constraints` name, which answers it as a whole.

    `tokens` are those of its prompts, `hashes` the packed hashes of the full blocks of the only one, `reader` as in `RouteQuery`. Its attempts
    are named after it, and numbered from `first` on. It is not sent again once `deaths_max` workers died while they had it: then it counts as the
    cause. A message that only saves time `waits` for no worker, and `TRIES_MAX` are tried.
    """

    request: str
    number: int | str
    tokens: int
    constraints: Constraints
    hashes: bytes = b""
    reader: str = ""
    first: int = 1
    deaths_max: int = DEATHS_MAX
    waits: bool = True

    def attempt(self, number: int) -> str:
        """The name of an attempt, in every log."""
        return f"{self.request}-{self.number}-{number}"


SendMessage = Callable[[Decision, str], Awaitable[T | Refused]]
"""Sends a message, under the name of the attempt, to the worker that was decided on, and returns its answer.

It raises `BusError` if the worker does not reply, and `ApiError` for what every other worker would say too.
"""


class Dispatcher:
    """Queries the router for one request: for its choices, or for messages that a worker answers as a whole."""

    def __init__(
        self, workers: WorkerRegistry, pool: str, hints: RoutingHints, trace: TraceContext = NO_TRACE
    ) -> None:
        self.workers = workers
        self.clock = workers.ports.clock
        self.pool = pool
        self.trace = trace
        self.tenant = hashing.tenant_digest(hints.flow.tenant)
        self._hints = hints
        self._opened_s = self.clock.monotonic_s()

    async def route(
        self, ask: AskRouter, prompt_tokens: int, max_tokens: int, hashes: bytes = b"", *, reader: str = ""
    ) -> RouteAnswer:
        """Query the router. `hashes` are the packed sequence hashes of the prompt's full blocks, `reader` as in `RouteQuery`. May be cancelled."""
        began_s = self.clock.monotonic_s()
        query = RouteQuery(
            ask.attempt,
            prompt_tokens,
            max_tokens,
            hashes,
            ask.constraints,
            reader=reader,
            trace=self.trace.trace,
        )
        query = self._hints.apply_to(query, passed_s=began_s - self._opened_s, waits=ask.may_wait)
        reply: Decision | RouteRefused | None = None
        failure = ""
        try:
            reply = await self.workers.routing.route(self.pool, query)
        except BusError as error:
            failure = str(error)
        times = self.workers.routing.waited_s(began_s), self.clock.monotonic_s()
        if reply is None:
            return RouterUnanswered(ask.number, failure, *times)
        if isinstance(reply, Decision):
            return Routed(ask.number, reply, *times)
        return RouterRefused(ask.number, reply, *times)


class MessagePlacement(Generic[T]):
    """The search for a worker that answers a message, under the rules of `Placement`.

    A search after the loss of a worker lasts as long as one that moves an answer: the only worker may have to start again.
    """

    def __init__(self, dispatcher: Dispatcher, message: Addressed) -> None:
        self._dispatcher = dispatcher
        self._message = message
        self._clock = dispatcher.clock
        self._search = Placement(self._clock.monotonic_s() + PLACE_S_MAX)
        self._number = message.first - 1
        self._decision: Decision | None = None
        self._may_wait = message.waits
        self._lost = 0
        self._died: set[tuple[str, int]] = set()

    @property
    def attempt(self) -> str:
        """The name of the present attempt."""
        return self._message.attempt(self._number)

    async def find(self) -> Decision:
        """Query the router until it names a worker. Raises `ApiError`."""
        message = self._message
        while True:
            if self._dispatcher.workers.closed:
                raise overloaded("This edge is restarting; retry.", 1.0)
            self._number += 1
            constraints = replace(message.constraints, exclude=self._search.excluded)
            ask = AskRouter(self._number, self.attempt, constraints, self._may_wait)
            answer = await self._dispatcher.route(
                ask, message.tokens, 0, message.hashes, reader=message.reader
            )
            self._search, error = self._search.answered(answer)
            if isinstance(answer, Routed):
                self._decision, self._may_wait = answer.decision, False
                return answer.decision
            if error is None and not message.waits:
                error = overloaded(self._search.reason)
            if error is not None:
                raise error
            await self._clock.sleep(self._search.pause_s(answer.now_s))
            self._search = self._search.paused()

    async def deliver(self, send: SendMessage[T], *, until_s: float = inf) -> T:
        """`send` the message to one worker after the other until one answers it, none after `until_s`. Raises `ApiError`.

        The first is the one that was found before, if one was.
        """
        while True:
            decision = self._decision or await self.find()
            sent_s = self._clock.monotonic_s()
            try:
                answer = await send(decision, self.attempt)
                # The router may have named one again that was ending already.
                died = (
                    isinstance(answer, Refused)
                    and answer.fatal
                    and (decision.worker, decision.epoch) not in self._died
                )
            except BusError as error:
                # A message that no process received cannot have been the cause.
                answer, died = Refused(str(error), True), not isinstance(error, NoResponder)
            if not isinstance(answer, Refused):
                return answer
            self._fail(decision, answer, sent_s, until_s, died=died)

    def _fail(
        self, decision: Decision, refused: Refused, sent_s: float, until_s: float, *, died: bool
    ) -> None:
        """A worker did not answer. Raises `ApiError` unless another one may be tried."""
        message, now_s = self._message, self._clock.monotonic_s()
        if not refused.retryable:
            raise rejected(refused.reason, refused.param)
        if now_s >= until_s or not (message.waits or self._number + 1 < message.first + TRIES_MAX):
            raise overloaded(refused.reason)
        # What a worker computed before it failed does not count as part of the search.
        search = self._search.extend(now_s - sent_s)
        if died:
            self._lost += 1
            self._died.add((decision.worker, decision.epoch))
            search = search.restart(now_s + MOVE_S_MAX)
        if self._lost >= message.deaths_max:
            _log.error(
                "request_ended_workers",
                request=message.request,
                choice=message.number,
                workers=self._lost,
                reason=refused.reason,
            )
            raise ended_workers(self._lost, refused.reason)
        self._search = search.refused_by_worker(
            decision.worker, decision.epoch, refused.reason, gone=refused.gone
        )
        self._decision = None
