"""Requests whose result is one whole: prompts to pool, media to encode, files to generate.

Each request runs in a task of its own, for as long as the engine takes. A copy of a request has no answer of its own; an edge cancels a
request like any other, and is told when the worker aborts it. Generation is served apart (`requests`), as its tokens are a stream.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from headwater.actors.bus import Bus, BusError, Message
from headwater.actors.runtime.actor import Spawn
from headwater.actors.worker.handoffs import RequestsByEdge, by_edge
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.requests import ABORTED, refusal_of
from headwater.schemas.messages.inference import Accepted, Cancel, Refused, WaitingEdge

_encode = msgspec.msgpack.Encoder().encode
_cancel = msgspec.msgpack.Decoder(Cancel)
_log = structlog.get_logger("headwater.worker")


class ReplyRequest(Protocol):
    """A request with a name that is its own, and the edge that waits for its answer."""

    @property
    def request(self) -> str:
        """The name of the request."""
        ...

    @property
    def waiter(self) -> WaitingEdge | None:
        """The edge that waits, if it answers for its requests."""
        ...


Request = TypeVar("Request", bound=ReplyRequest)


class _Running(NamedTuple):
    task: asyncio.Task[None]
    message: Message
    waiter: WaitingEdge | None


class ReplyServer(ABC, Generic[Request]):
    """The requests of one kind at one worker, counted in `inflight` from when they are accepted until they are answered, or dropped."""

    kind: ClassVar[str]
    """What is computed, as in the names of tasks and in refusals."""
    active_max: ClassVar[int] = 256
    """Requests at once; one more is refused, and its edge tries another worker."""
    keeps_results: ClassVar[bool] = False
    """Is a request accepted at once, and its result kept until its edge cancels it? Else the reply is the result."""
    is_bug_fatal: ClassVar[bool] = False
    """Does a bug of the engine count as its death?"""

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Request]",
        bus: Bus,
        spawn: Spawn,
        status: WorkerStatus,
        inflight: Inflight,
    ) -> None:
        self._decoder = decoder
        self._bus = bus
        self._spawn = spawn
        self._status = status
        self._inflight = inflight
        self._running: dict[str, _Running] = {}

    @abstractmethod
    async def compute(self, request: Request) -> object:
        """Return the result. What it raises becomes a refusal."""

    @abstractmethod
    def accept(self, request: Request) -> object | None:
        """Count a request that the worker takes. Return the reply to one that is declined all the same, which is counted as ended."""

    @abstractmethod
    def finish(self, request: str) -> None:
        """Count the end of a request that was accepted."""

    async def on_request(self, message: Message) -> None:
        """Accept a request, or refuse it."""
        try:
            request = self._decoder.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._reply(message, Refused(f"unreadable request: {error}", False))
        return await self.receive(message, request)

    async def receive(self, message: Message, request: Request) -> None:
        """Accept a request, or refuse it."""
        if self._inflight.knows(request.request):
            # A copy: there is one answer.
            return await self._reply(message, Accepted()) if self.keeps_results else None
        refusal = self._status.refusal()
        if not refusal and len(self._running) >= self.active_max:
            refusal = f"it has {self.active_max} requests of this kind already ({self.kind})"
        if refusal:
            return await self._reply(message, self._status.refuse(refusal))
        declined = self.accept(request)
        if declined is not None:
            self.finish(request.request)
            return await self._reply(message, declined)
        task = self._spawn(self._answer(message, request), self.kind)
        self._running[request.request] = _Running(task, message, request.waiter)
        if self.keeps_results:
            return await self._reply(message, Accepted())
        # Not at the end of `_answer`: a task may be cancelled before it starts.
        task.add_done_callback(lambda _: self._end(request.request))
        return None

    async def on_cancel(self, message: Message) -> None:
        """Cancel requests that no client waits for any more."""
        self.abort(_cancel.decode(message.data).requests)

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`."""
        return by_edge((request, running.waiter) for request, running in self._running.items())

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`."""
        for request in requests:
            if request in self._running:
                self._running[request].task.cancel()
                if self.keeps_results:
                    self._end(request)

    def abort_all(self) -> None:
        """Abort all requests and reply so: their edges try another worker, or do without."""
        for running in list(self._running.values()):
            running.task.cancel()
            # A worker that only sleeps keeps its lease: without this reply the edge would wait for its timeout.
            self._spawn(self._reply(running.message, ABORTED), f"{self.kind} aborted")

    async def _answer(self, message: Message, request: Request) -> None:
        try:
            result = await self.compute(request)
        except Exception as error:
            result = refusal_of(error, request.request, self._status, fatal=self.is_bug_fatal)
        await self.deliver(message, request, result)

    async def deliver(self, message: Message, request: Request, result: object) -> None:
        """Pass on what was computed, or why it was not."""
        await self._reply(message, result)

    async def _reply(self, message: Message, reply: object) -> None:
        try:
            await self._bus.publish(message.reply, _encode(reply))
        except BusError as error:
            _log.warning("reply_failed", kind=self.kind, reason=str(error))

    def _end(self, request: str) -> None:
        del self._running[request]
        self.finish(request)
