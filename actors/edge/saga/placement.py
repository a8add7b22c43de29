"""The placement of what a request has workers do: queries to the router, and the messages to the workers that it names.

Choices of a request, whose tokens are streamed, are placed by their saga (`headwater.actors.edge.saga.driver`). Prompts to pool, media to encode and
files to generate are messages that a worker answers as a whole: `MessagePlacement` finds their workers, by the same rules (`Placement`).

Images of a request are sent to encode workers (`Encoders`) before the request is dispatched. The encode leg can only save time: where no encode
worker takes an image, or one dies with it, the worker that serves the request encodes it itself. So it is no state of a request's saga, and its
failure is no setback.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import structlog
from msgspec.structs import replace

from headwater.actors import metrics
from headwater.actors.edge.saga.http_call import RoutingHints
from headwater.actors.edge.saga.saga import DEATHS_MAX, left_out
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
from headwater.actors.edge.saga.workers import UNANSWERED_MAX, WorkerRegistry
from headwater.actors.http.errors import ApiError, ended_workers, overloaded, rejected
from headwater.actors.runtime.ports import BusError, NoResponder, ReplyTimeout
from headwater.router.encode_leg import NOT_APART, LegEstimate, weigh_encoding
from headwater.schemas import hashing, subjects
from headwater.schemas.encode_requests import (
    Declined,
    Encoded,
    EncodeRequest,
    embedding_blocks,
    embedding_hashes,
)
from headwater.schemas.events import EncodeOutcome, RequestEncoded
from headwater.schemas.hashing import U32, pack_hashes
from headwater.schemas.inference import Refused
from headwater.schemas.media import PromptMedia
from headwater.schemas.names import NO_TRACE, TraceContext
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    Constraints,
    Decision,
    RouteQuery,
    RouteQueued,
    RouteRefused,
    RouteReply,
    RouteWait,
)
from headwater.schemas.tables import ENCODE_NEEDS

T = TypeVar("T")

TRIES_MAX: Final = 2
"""Workers that are tried for a message that waits for none."""

ROUTE_TIMEOUT_S: Final = 2.0
"""The time limit of a route query, and of each long poll of a queued one, which routers hold for a shorter time."""

_encode = msgspec.msgpack.Encoder().encode
_route: msgspec.msgpack.Decoder[RouteReply] = msgspec.msgpack.Decoder(RouteReply)

_log = structlog.get_logger("headwater.edge")
_routing_log = structlog.get_logger("headwater.edge.routing")


class Addressed(NamedTuple):
    """Message `number` of a request, for one of the workers with what `constraints` name, which answers it as a whole.

    `tokens` are those of its prompts, `hashes` the packed hashes of the full blocks of the only one, `reader` as in `RouteQuery`. Its attempts
    are named after it, and numbered from `first` on. It is not sent again once `deaths_max` workers died while they had it: then it counts as the
    cause. A message that only saves time `waits` for no worker, and `TRIES_MAX` are tried. `max_tokens` are generated at most.
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
    max_tokens: int = 0

    def attempt(self, number: int) -> str:
        """The name of an attempt, in every log."""
        return f"{self.request}-{self.number}-{number}"


SendMessage = Callable[[Decision, str], Awaitable[T | Refused]]
"""Sends a message, under the name of the attempt, to the worker that was decided on, and returns its answer.

It raises `BusError` if the worker does not reply, and `ApiError` for what every other worker would say too.
"""


class Dispatcher:
    """Queries routers for one request: for its choices, or for messages that a worker answers as a whole."""

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
        """Query a router. `hashes` are the packed sequence hashes of the prompt's full blocks, `reader` as in `RouteQuery`. May be cancelled.

        The time that the answer says the query waited is what it spent in the queue, which the router bounds, not the edge.
        """
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
            reply = await self.query(query)
        except BusError as error:
            failure = str(error)
        now_s = self.clock.monotonic_s()
        times = max(0.0, now_s - began_s - ROUTE_TIMEOUT_S), now_s
        if reply is None:
            return RouterUnanswered(ask.number, failure, *times)
        if isinstance(reply, Decision):
            return Routed(ask.number, reply, *times)
        return RouterRefused(ask.number, reply, *times)

    async def query(self, query: RouteQuery) -> Decision | RouteRefused:
        """Query a router, for as long as it keeps the query queued. Raises `BusError` if none replies.

        Cancelling the call removes the query from the router's queue.
        """
        ports = self.workers.ports
        subject = subjects.route_query(ports.ns, self.pool)
        reply = _route.decode(await ports.bus.request(subject, _encode(query), timeout_s=ROUTE_TIMEOUT_S))
        if not isinstance(reply, RouteQueued):
            return reply
        subject = subjects.route_wait(ports.ns, self.pool, reply.router, reply.epoch)
        try:
            while isinstance(reply, RouteQueued):
                reply = await self._poll(subject, query.request)
        except (BusError, asyncio.CancelledError):
            _leave_queue(self.workers, subject, query.request)
            raise
        return reply

    async def _poll(self, subject: str, request: str) -> RouteReply:
        """One reply; a poll or reply that was lost is sent again."""
        data = _encode(RouteWait(request))
        unanswered = 0
        while True:
            try:
                return _route.decode(
                    await self.workers.ports.bus.request(subject, data, timeout_s=ROUTE_TIMEOUT_S)
                )
            except ReplyTimeout:
                unanswered += 1
                if unanswered >= UNANSWERED_MAX:
                    raise


def withdraw(workers: WorkerRegistry, pool: str, request: str, routers: Iterable[tuple[str, int]]) -> None:
    """Have the router that decided a request, one of these incarnations, void that unless a worker has accepted it. Does not wait."""
    for router, epoch in routers:
        _leave_queue(workers, subjects.route_wait(workers.ports.ns, pool, router, epoch), request)


def _leave_queue(workers: WorkerRegistry, subject: str, request: str) -> None:
    async def publish_gone() -> None:
        try:
            await workers.ports.bus.publish(subject, _encode(RouteWait(request, gone=True)))
        except BusError as error:
            _routing_log.info("route_cancel_not_sent", attempt=request, reason=str(error))

    try:
        workers.spawn(publish_gone(), "gone")
    except ApiError:
        # The edge itself ends: the router notices that the polls stop.
        _routing_log.debug("route_cancel_not_sent", attempt=request)


class MessagePlacement(Generic[T]):
    """The search for a worker that answers a message, under the rules of `Placement`.

    A search after the loss of a worker lasts as long as one that moves an answer: the only worker may have to start again.
    `unreachable` are incarnations that no query may name, as they are when it is made.
    """

    def __init__(
        self, dispatcher: Dispatcher, message: Addressed, unreachable: Callable[[], Iterable[str]] = tuple
    ) -> None:
        self._dispatcher = dispatcher
        self._message = message
        self._unreachable = unreachable
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
            exclude = tuple(dict.fromkeys((*left_out(self._search), *self._unreachable())))
            constraints = replace(message.constraints, exclude=exclude)
            ask = AskRouter(self._number, self.attempt, constraints, self._may_wait)
            answer = await self._dispatcher.route(
                ask, message.tokens, message.max_tokens, message.hashes, reader=message.reader
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


DECLINE_S_MAX: Final = 1.0
"""The longest time that an encode worker may take to note an image that it should not encode. Nothing waits for it."""

_encode_log = structlog.get_logger("headwater.edge.encode")


class EncodeLeg(NamedTuple):
    """What identifies the request of an encode leg: the `decision`, and the `attempt` that it belongs to."""

    request: str
    choice: int
    attempt: str
    decision: Decision


class Encoders:
    """The encode legs of one request."""

    def __init__(self, dispatcher: Dispatcher, block_size: int) -> None:
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._clock = dispatcher.clock
        self._block_size = block_size

    async def encode(
        self, leg: EncodeLeg, media: Sequence[PromptMedia], constraints: Constraints = NO_CONSTRAINTS
    ) -> tuple[tuple[PromptMedia, ...], list[RequestEncoded]]:
        """The images, with the embeddings that encode workers offer, and the events to record. May be cancelled.

        `constraints` are the request's: its encode workers tolerate the same, and process images with the same settings.
        """
        decision = leg.decision
        form = self._workers.embedding_format(
            self._dispatcher.pool, decision.worker, {item.kind for item in media}
        )
        if not form or self._workers.encode_legs == "never":
            return tuple(media), []
        allowed = Constraints(
            pairs_with=form,
            tolerates=constraints.tolerates,
            media_processor=constraints.media_processor,
        )
        cached = decision.chosen.cached_blocks * self._block_size
        images = [
            self._image(leg, number, item, replace(allowed, needs=ENCODE_NEEDS[item.kind]))
            for number, item in enumerate(media)
            # The KV or the embedding of others is there.
            if item.given is None and item.start + item.tokens > cached
        ]
        await asyncio.gather(*(self._find_worker(image) for image in images))
        routed = [(image, image.decision) for image in images if image.decision is not None]
        if routed:
            tokens = [image.item.tokens for image, _ in routed]
            estimate = weigh_encoding(leg.attempt, tokens, [answer for _, answer in routed], decision)
            if self._workers.encode_legs == "always":
                estimate = estimate.forced()
            pairs = zip(routed, estimate.ahead_max, strict=True)
            await asyncio.gather(*(self._encode(image, estimate, ahead) for (image, _), ahead in pairs))
        sent = list(media)
        for image in images:
            sent[image.number] = image.item
            metrics.ENCODE_LEGS.labels(image.outcome).inc()
        return tuple(sent), [image.event() for image in images]

    def _image(self, leg: EncodeLeg, number: int, item: PromptMedia, constraints: Constraints) -> "_Image":
        tokens = embedding_blocks(item, self._block_size) * self._block_size
        hashes = pack_hashes(embedding_hashes(item, self._block_size))
        reader = leg.decision.worker
        message = Addressed(
            leg.attempt, f"e{number}", tokens, constraints, hashes, reader, first=0, waits=False
        )
        return _Image(
            leg, number, item, MessagePlacement(self._dispatcher, message), self._clock.monotonic_s()
        )

    async def _find_worker(self, image: "_Image") -> None:
        """Query the router for an encode worker."""
        try:
            image.decision = await image.placement.find()
        except ApiError:
            image.reason = "no encode worker takes it"
            image.ended_s = self._clock.monotonic_s()

    async def _encode(self, image: "_Image", estimate: LegEstimate, ahead_max: int) -> None:
        image.estimate, image.ahead_max = estimate, ahead_max
        if ahead_max == NOT_APART:
            image.outcome, image.reason = "local", "encoding it there is not expected to be faster"
            self._decline(image)
        else:
            until_s = self._clock.monotonic_s() + estimate.wait_s
            # Where none takes it, the worker that serves the request encodes it: `image` says why.
            with contextlib.suppress(ApiError):
                await image.placement.deliver(partial(self._ask, image, until_s), until_s=until_s)
        image.ended_s = self._clock.monotonic_s()

    async def _ask(
        self, image: "_Image", until_s: float, decision: Decision, attempt: str
    ) -> Encoded | Declined | Refused:
        """Ask an encode worker, and note its answer."""
        image.worker, image.epoch = worker, epoch = decision.worker, decision.epoch
        left_s = until_s - self._clock.monotonic_s()
        try:
            with self._workers.waiting() as waiter:
                request = EncodeRequest(attempt, self._workers.edge, image.item, image.ahead_max, waiter)
                reply = await self._workers.encode(worker, epoch, request, left_s)
        except BusError as error:
            reply = Refused(str(error), True)
        match reply:
            case Encoded():
                image.item = replace(image.item, embedding=reply.embedding)
                image.outcome = "cached" if reply.cached else "computed"
            case Declined():
                image.outcome = "local"
                image.reason = f"{reply.ahead} tokens of other images were ahead of it"
            case Refused():
                image.reason = reply.reason
                _encode_log.info(
                    "image_not_encoded",
                    request=image.leg.request,
                    worker=worker,
                    epoch=epoch,
                    reason=image.reason,
                )
        return reply

    def _decline(self, image: "_Image") -> None:
        """Have the encode worker report that it does not encode the image, which ends what the router counted for it. Does not wait."""
        answer = image.decision
        assert answer is not None
        image.worker, image.epoch = answer.worker, answer.epoch
        request = EncodeRequest(image.placement.attempt, self._workers.edge, image.item, NOT_APART)

        async def send() -> None:
            with contextlib.suppress(BusError):
                await self._workers.encode(answer.worker, answer.epoch, request, DECLINE_S_MAX)

        # An edge that ends sends nothing more.
        with contextlib.suppress(ApiError):
            self._workers.spawn(send(), "decline")


class _Image:
    """An image of a request on its way to an encode worker. `decision` is the first one, which the estimate is for."""

    def __init__(
        self,
        leg: EncodeLeg,
        number: int,
        item: PromptMedia,
        placement: "MessagePlacement[Encoded | Declined]",
        now_s: float,
    ) -> None:
        self.leg = leg
        self.number = number
        self.item = item
        self.placement = placement
        self.decision: Decision | None = None
        self.estimate: LegEstimate | None = None
        self.ahead_max = 0
        self.outcome: EncodeOutcome = "failed"
        self.worker, self.epoch, self.reason = "", 0, ""
        self.began_s = self.ended_s = now_s

    def event(self) -> RequestEncoded:
        """Return the event for the request log: what came of the leg."""
        estimate = self.estimate
        return RequestEncoded(
            self.leg.request,
            self.leg.choice,
            self.leg.attempt,
            self.item.id,
            self.item.tokens,
            self.outcome,
            self.worker,
            self.epoch,
            round((self.ended_s - self.began_s) * 1000, 3),
            self.reason,
            self.ahead_max,
            round(estimate.apart_ms, 3) if estimate is not None else 0.0,
            round(estimate.here_ms, 3) if estimate is not None else 0.0,
        )


class TokenSequence:
    """A prompt and what was generated for it, with the hashes of its full blocks, computed once per length."""

    def __init__(
        self,
        prompt: U32,
        block_size: int,
        lora_name: str,
        cache_salt: str,
        media: Sequence[PromptMedia] = (),
    ) -> None:
        self._media: list[hashing.MultimodalDigest] = []
        if media:
            places = [(item.id, item.start, item.tokens) for item in media]
            self._media = hashing.media_digests(places, block_size)
        self._prompt = prompt
        self.block_size = block_size
        self._root = hashing.seed(lora_name, cache_salt)
        self._tokens = prompt
        self._hashes = self._hash()

    def extend(self, emitted: list[int]) -> tuple[U32, bytes]:
        """Tokens of the prompt followed by all `emitted`, and the packed hashes of their full blocks."""
        if len(self._tokens) != len(self._prompt) + len(emitted):
            self._tokens = np.concatenate([self._prompt, np.array(emitted, np.uint32)])
            self._hashes = self._hash()
        return self._tokens, self._hashes

    def _hash(self) -> bytes:
        hashes = hashing.sequence_hashes(
            self._tokens, self.block_size, parent=self._root, multimodal=self._media
        )
        return hashing.pack_hashes(hashes)
