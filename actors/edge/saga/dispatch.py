"""The messages that place a request: route queries to the router, and the request itself to the worker that it names."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import structlog

from headwater.actors.bus import BusError, MessageTooLarge, NoResponder
from headwater.actors.edge.saga.picked import Picked
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.routing_hints import RoutingHints
from headwater.actors.edge.saga.types import (
    MOVE_S_MAX,
    PLACE_S_MAX,
    AskRouter,
    Attempt,
    ChoiceSpec,
    Dispatch,
    LegAccepted,
    LegRefused,
    LegUnanswered,
    Placement,
    Routed,
    RouterRefused,
    RouterUnanswered,
    attempt_name,
)
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.http.errors import ApiError, ended_workers, overloaded, refused_by_router
from headwater.schemas import hashing
from headwater.schemas.constraints import Constraints
from headwater.schemas.events.request import RequestEncoded
from headwater.schemas.events.route import Decision, RouteQuery, RouteRefused
from headwater.schemas.hashing import U32
from headwater.schemas.messages.inference import Accepted, GenerateRequest, Sampling
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.trace import NO_TRACE, TraceContext

T = TypeVar("T")

PAUSE_S: Final = 0.1
PAUSE_S_MAX: Final = 2.0
"""Pauses between two queries, doubled from the first value to the last, while the router names no worker."""

_log = structlog.get_logger("headwater.edge")


class WorkerDied(Exception):
    """A worker, or its engine, died while it had a message. `gone`: it said so itself, so this incarnation is not tried again."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


class NotTaken(NamedTuple):
    """Why a worker did not take a message; another one may. `gone`: this incarnation of the worker takes none any more."""

    reason: str
    gone: bool = False


class Addressed(NamedTuple):
    """Message `number` of a request, for one of the workers with what `constraints` name. `tokens` are those of its prompts,
    `hashes` the packed hashes of the full blocks of the only one.

    It is not sent again once `deaths_max` workers died while they had it: then it counts as the cause.
    """

    request: str
    number: int
    tokens: int
    constraints: Constraints
    deaths_max: int
    hashes: bytes = b""


class RouteAnswer(NamedTuple):
    """The router's reply, None with a `failure` where no router replied, and the seconds spent in its queue."""

    reply: Decision | RouteRefused | None
    failure: str
    waited_s: float


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
        return RouteAnswer(reply, failure, self.workers.routing.waited_s(began_s))

    async def place(
        self,
        message: Addressed,
        record: RequestLogWriter,
        send: Callable[[Decision, str], Awaitable[T | NotTaken]],
    ) -> T:
        """`send` a message, under the name of the attempt, to one worker after the other until one answers it.

        `send` raises `BusError` if the worker does not reply, and `WorkerDied`. A search after the loss of a worker lasts as long as one
        that moves an answer: the only worker may have to start again. Raises `ApiError`.
        """
        clock = self.clock
        placement = Placement(clock.monotonic_s() + PLACE_S_MAX)
        pause_s = PAUSE_S
        attempts = lost = 0
        died: set[tuple[str, int]] = set()
        was_routed = False
        while True:
            if self.workers.closed:
                raise overloaded("This edge is restarting; retry.", 1.0)
            attempts += 1
            attempt = f"{message.request}-{message.number}-{attempts}"
            constraints = msgspec.structs.replace(message.constraints, exclude=placement.excluded)
            ask = AskRouter(attempts, attempt, constraints, may_wait=not was_routed)
            reply, failure, waited_s = await self.route(ask, message.tokens, 0, message.hashes)
            placement = placement.extend(waited_s)
            if not isinstance(reply, Decision):
                placement = _unrouted(placement, reply, failure, clock.monotonic_s())
                await clock.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                continue
            was_routed = True
            record.routed(message.number, attempt, reply.worker, reply.epoch)
            sent_s, lost_before = clock.monotonic_s(), lost
            try:
                answer = await send(reply, attempt)
            except BusError as failed:
                # A message that no process received cannot have been the cause.
                lost += not isinstance(failed, NoResponder)
                answer = NotTaken(str(failed))
            except WorkerDied as failed:
                # The router may have named one again that was ending already.
                lost += (reply.worker, reply.epoch) not in died
                died.add((reply.worker, reply.epoch))
                answer = NotTaken(str(failed), failed.gone)
            if not isinstance(answer, NotTaken):
                return answer
            if lost >= message.deaths_max:
                raise _ended_workers(message, lost, answer.reason)
            # What a worker computed before it died does not count as part of the search.
            placement = placement.extend(clock.monotonic_s() - sent_s)
            if lost > lost_before:
                placement = placement.restart(clock.monotonic_s() + MOVE_S_MAX)
            placement = placement.refused_by_worker(
                reply.worker, reply.epoch, answer.reason, gone=answer.gone
            )


def _unrouted(placement: Placement, reply: RouteRefused | None, failure: str, now_s: float) -> Placement:
    """The placement of a message for which the router named no worker. Raises `ApiError` if it need not be asked again."""
    if reply is None:
        placement = placement.unanswered(failure)
    elif reply.for_good:
        raise refused_by_router(reply)
    else:
        placement = placement.refused_by_router(reply)
    error = placement.expired(now_s)
    if error is not None:
        raise error
    return placement


def _ended_workers(message: Addressed, lost: int, reason: str) -> ApiError:
    """The error of a message that counts as the cause of its workers' deaths, which is logged."""
    _log.error(
        "request_ended_workers", request=message.request, choice=message.number, workers=lost, reason=reason
    )
    return ended_workers(lost, reason)


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


class ChoiceMessages:
    """The messages of one choice's saga: carries out `AskRouter` and `Dispatch`, and returns the event of the answer."""

    def __init__(
        self,
        spec: ChoiceSpec,
        prompt: U32,
        block_size: int,
        dispatcher: Dispatcher,
        media: tuple[PromptMedia, ...] = (),
    ) -> None:
        self._spec = spec
        self._media = self._sent_media = media
        self._decision: Decision | None = None
        """The last one: the worker that the next leg goes to."""
        self._sequence = TokenSequence(prompt, block_size, spec.constraints.lora_name, spec.cache_salt, media)
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._clock = dispatcher.clock

    def fits(self, picked: Picked) -> bool:
        """Was it decided for this choice, and for the same prompt? The hash of the last full block covers all before it, and the cache salt."""
        decision = picked.decision
        tokens, packed = self._sequence.extend([])
        hashes = hashing.unpack_hashes(packed)
        own = (
            self._dispatcher.pool,
            attempt_name(self._spec, picked.attempt),
            len(tokens),
            len(hashes),
            int(hashes[-1]) if len(hashes) else 0,
        )
        made_for = decision.request, decision.prompt_tokens, decision.blocks, decision.last
        return own == (picked.pool, *made_for)

    async def query_router(
        self, ask: AskRouter, emitted: list[int]
    ) -> Routed | RouterRefused | RouterUnanswered:
        """Query the router for a worker that generates what follows `emitted`."""
        tokens, hashes = self._sequence.extend(emitted)
        max_tokens = self._spec.sampling.max_tokens - len(emitted)
        reply, failure, waited_s = await self._dispatcher.route(ask, len(tokens), max_tokens, hashes)
        now_s = self._clock.monotonic_s()
        if reply is None:
            return RouterUnanswered(ask.number, failure, waited_s, now_s)
        if isinstance(reply, Decision):
            self._decision = reply
            return Routed(ask.number, reply, waited_s, now_s)
        return RouterRefused(ask.number, reply, waited_s, now_s)

    async def send_leg(
        self, effect: Dispatch, handle: int, emitted: list[int]
    ) -> LegAccepted | LegRefused | LegUnanswered:
        """Send a worker its leg, whose frames will carry `handle`."""
        attempt, spec = effect.attempt, self._spec
        tokens, _ = self._sequence.extend(emitted)
        request = GenerateRequest(
            request=attempt.name,
            edge=self._workers.edge,
            handle=handle,
            tokens=hashing.pack_tokens(tokens),
            sampling=_remaining_sampling(spec.sampling, len(emitted), decodes=attempt.leg == "decode"),
            emitted=len(emitted),
            lora_name=spec.constraints.lora_name,
            cache_salt=spec.cache_salt,
            priority=spec.priority,
            leg=attempt.leg,
            handoff=effect.handoff,
            media=self._sent_media,
            edge_epoch=self._workers.epoch,
            tenant=self._dispatcher.tenant,
            trace=self._dispatcher.trace,
        )
        try:
            reply = await self._workers.generate(attempt.worker, attempt.epoch, request)
        except MessageTooLarge as error:
            refused = attempt.number, str(error), False, effect.handoff is not None, ""
            return LegRefused(*refused, self._clock.monotonic_s())
        except BusError as error:
            delivered = not isinstance(error, NoResponder)
            return LegUnanswered(attempt.number, str(error), delivered, self._clock.monotonic_s())
        now_s = self._clock.monotonic_s()
        if isinstance(reply, Accepted):
            return LegAccepted(attempt.number, now_s)
        refused = attempt.number, reply.reason, reply.retryable, reply.spent, reply.param
        return LegRefused(*refused, now_s, reply.gone)

    async def encode_images(self, attempt: Attempt) -> list[RequestEncoded]:
        """Have encode workers encode the images of a leg that is going to be sent; returns the events to record."""
        self._sent_media = self._media
        decision = self._decision
        if not self._media or attempt.leg == "decode" or decision is None:
            return []
        # Imported for requests with media only: a prompt of text takes a short way through the edge.
        from headwater.actors.edge.saga.encoders import EncodeLeg, Encoders

        spec = self._spec

        async def route(
            name: str, constraints: Constraints, tokens: int, hashes: bytes, reader: str
        ) -> Decision | None:
            answer = await self._dispatcher.route(
                AskRouter(0, name, constraints, may_wait=False), tokens, 0, hashes, reader=reader
            )
            return answer.reply if isinstance(answer.reply, Decision) else None

        encoders = Encoders(
            self._workers, self._clock, route, self._dispatcher.pool, self._sequence.block_size
        )
        leg = EncodeLeg(spec.request, spec.index, attempt.name, decision)
        self._sent_media, events = await encoders.encode(leg, self._media, spec.constraints)
        return events


def _remaining_sampling(sampling: Sampling, emitted: int, *, decodes: bool) -> Sampling:
    """The sampling of what follows the tokens `emitted`. The prompt's log probabilities are computed once."""
    if decodes and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    if not emitted:
        return sampling
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - emitted,
        min_tokens=max(0, sampling.min_tokens - emitted),
        prompt_logprobs=None,
    )
