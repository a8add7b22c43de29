"""The driver of a saga: it carries out the saga's effects, which are messages to routers and workers (`ChoiceMessages`), timers, the request log and metrics."""

import asyncio
from typing import Protocol, assert_never

import structlog
from msgspec.structs import replace

from headwater.actors import metrics
from headwater.actors.edge.saga.http_call import Picked
from headwater.actors.edge.saga.placement import Dispatcher, EncodeLeg, Encoders, TokenSequence
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.saga import attempt_name, step
from headwater.actors.edge.saga.types import (
    SETBACKS,
    TRANSITIONS,
    Aborted,
    AskRouter,
    AskStatus,
    Attempt,
    AwaitedEffect,
    CancelAttempt,
    Cancelled,
    ChoiceSpec,
    Detach,
    Dispatch,
    Effect,
    Emit,
    Finish,
    Frame,
    HolderLost,
    LegAccepted,
    LegFinished,
    LegLost,
    LegRefused,
    LegUnanswered,
    Opened,
    PauseSearch,
    RecordEvent,
    RetryDue,
    RouteAnswer,
    Routed,
    Saga,
    SagaEvent,
    StopMatched,
    TimedOut,
)
from headwater.actors.edge.saga.workers import UNANSWERED_MAX, WorkerRegistry
from headwater.actors.http.errors import ENDED_WORKERS, ApiError, rejected
from headwater.actors.runtime.ports import BusError, MessageTooLarge, NoResponder
from headwater.schemas import hashing
from headwater.schemas.events import RequestEncoded, RequestStepped
from headwater.schemas.hashing import U32
from headwater.schemas.inference import (
    Accepted,
    FrameEntry,
    GenerateRequest,
    Sampling,
    StatusQuery,
    TokenLogprob,
)
from headwater.schemas.media import PromptMedia
from headwater.schemas.routing import Decision

PREFILL_S_MAX = 300.0
"""Seconds that a prefill leg may take, its queue at the worker included, before it moves to another worker."""

SILENCE_S_MAX = 2.0
"""Seconds without a frame after which the worker is queried: a frame may be lost, or the worker dead."""

for _phase, _cause in TRANSITIONS:
    if _cause in SETBACKS:
        metrics.SETBACKS.labels(_phase, _cause)

_log = structlog.get_logger("headwater.saga")


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
        expected = (
            self._dispatcher.pool,
            attempt_name(self._spec, picked.attempt),
            len(tokens),
            len(hashes),
            int(hashes[-1]) if len(hashes) else 0,
        )
        made_for = decision.request, decision.prompt_tokens, decision.blocks, decision.last
        return expected == (picked.pool, *made_for)

    async def query_router(self, ask: AskRouter, emitted: list[int]) -> RouteAnswer:
        """Query the router for a worker that generates what follows `emitted`."""
        tokens, hashes = self._sequence.extend(emitted)
        max_tokens = self._spec.sampling.max_tokens - len(emitted)
        answer = await self._dispatcher.route(ask, len(tokens), max_tokens, hashes)
        if isinstance(answer, Routed):
            self._decision = answer.decision
        return answer

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
        spec = self._spec
        encoders = Encoders(self._dispatcher, self._sequence.block_size)
        leg = EncodeLeg(spec.request, spec.index, attempt.name, decision)
        self._sent_media, events = await encoders.encode(leg, self._media, spec.constraints)
        return events


def _remaining_sampling(sampling: Sampling, emitted: int, *, decodes: bool) -> Sampling:
    """The sampling of what follows the tokens `emitted`. The prompt's log probabilities are computed once."""
    if decodes and sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)
    if not emitted:
        return sampling
    return replace(
        sampling,
        max_tokens=sampling.max_tokens - emitted,
        min_tokens=max(0, sampling.min_tokens - emitted),
        prompt_logprobs=None,
    )


# The driver.


class ChoiceOutput(Protocol):
    """Turns the tokens of choices into an HTTP response. Called on the event loop; must not block."""

    def write_tokens(self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """New tokens of a choice: in order, each once."""
        ...

    def write_end(self, index: int) -> None:
        """The choice ended: `ChoiceDriver.saga.end` says how."""
        ...


class ChoiceDriver:
    """One choice of a request. `emitted` are all tokens so far, `error` is set if it ended with one.

    `prompt_logprobs` are there with the first token at the latest, if they were asked for.
    """

    def __init__(
        self,
        spec: ChoiceSpec,
        messages: ChoiceMessages,
        workers: WorkerRegistry,
        record: RequestLogWriter,
        output: ChoiceOutput,
    ) -> None:
        self.saga = Saga(spec)
        self._index = spec.index
        self.emitted: list[int] = []
        self.error: ApiError | None = None
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._messages = messages
        self._workers = workers
        self._clock = workers.ports.clock
        self._record = record
        self._output = output
        self._handle = 0
        self._followed: tuple[int, str] | None = None
        """Handle and name of a prefill leg that runs in parallel with the decode leg."""
        self._heard_s = 0.0
        self._querying = False
        self._unanswered = 0
        self._move: asyncio.Task[None] | None = None

    async def place(self, pinned: str = "", picked: Picked | None = None) -> None:
        """Find a worker that takes the choice, or its prompt: the one that was `picked`, if any. May be cancelled.

        Raises `ApiError` if it ended with an error before its first token; a later error belongs into the response.
        """
        opened = Opened(pinned, self._clock.monotonic_s())
        if picked is not None:
            decided = picked.decision if self._messages.fits(picked) else None
            if decided is None:
                _log.warning("pick_not_followed", **self._record.log_fields, attempt=picked.decision.request)
            opened = replace(opened, attempts=picked.attempt, decided=decided)
        await self._pursue(self.feed(opened))
        if self.error is not None and not self.emitted:
            raise self.error

    def close(self) -> None:
        """End the choice, unless it ended: its client disconnected. Forgets the output, which may not be asked for anything more.

        The output owns its drivers: each would keep the other, and the whole request, until the garbage collector finds them.
        """
        if self.saga.end is None:
            self.feed(Cancelled())
        del self._output

    def abort(self, error: ApiError) -> None:
        """End the choice with an error, unless it ended."""
        self.feed(Aborted(error))

    def stop(self) -> None:
        """End the choice, unless it ended: its text contains a stop string."""
        self.feed(StopMatched())

    # What `headwater.actors.edge.saga.workers.FrameReceiver` asks for.

    @property
    def source(self) -> tuple[str, int] | None:
        """See `FrameReceiver.source`."""
        attempt = self.saga.attempt
        return (attempt.worker, attempt.epoch) if self.saga.streaming else None

    @property
    def holder(self) -> tuple[str, int] | None:
        """See `FrameReceiver.holder`."""
        holder = self.saga.awaited
        return (holder.worker, holder.epoch) if holder is not None else None

    def receive(self, entry: FrameEntry, now_s: float) -> None:
        """See `FrameReceiver.receive`."""
        if entry.prompt_logprobs:
            self.prompt_logprobs = entry.prompt_logprobs
        if self._followed is not None and entry.handle == self._followed[0]:
            self._receive_followed(entry)
            return
        self._heard_s = now_s
        following = self.feed(Frame(entry, now_s))
        if entry.finish and entry.finish != "handoff":
            position = entry.position + len(entry.tokens)
            finished = LegFinished(position, entry.finish, entry.detail, entry.param, now_s)
            following = self.feed(finished) or following
        if following is not None:
            self._move_on(following)

    def lose_worker(self, reason: str) -> None:
        """See `FrameReceiver.lose_worker`."""
        self._lose(self.saga.attempt.number, reason)

    def lose_holder(self, reason: str) -> None:
        """See `FrameReceiver.lose_holder`."""
        holder = self.saga.awaited
        if holder is not None:
            self._lose_holder(holder.attempt, reason, "lost")

    def _lose_holder(self, attempt: str, reason: str, finish: str) -> None:
        self._move_on(self.feed(HolderLost(attempt, reason, self._clock.monotonic_s(), finish)))

    def _receive_followed(self, entry: FrameEntry) -> None:
        """A prefill leg that ended well is of no interest here: its KV went to the decode leg."""
        if entry.finish == "rejected":
            self.abort(rejected(entry.detail, entry.param or self.saga.spec.guide_param))
        elif entry.finish not in ("", "handoff") and self.saga.awaited is not None:
            reason = f"the prefill leg failed: {entry.detail or entry.finish}"
            self._lose_holder(self.saga.awaited.attempt, reason, entry.finish)

    def check_silence(self, now_s: float) -> None:
        """See `FrameReceiver.check_silence`."""
        saga = self.saga
        if saga.state == "prefill" and now_s - saga.attempt.began_s > PREFILL_S_MAX:
            self._move_on(self.feed(TimedOut(saga.attempt.number, now_s)))
        elif saga.streaming and now_s - self._heard_s > SILENCE_S_MAX:
            self._query_status()

    # Effects.

    def feed(self, event: SagaEvent) -> AwaitedEffect | None:
        """Take one step and carry out its effects; returns the one that the saga awaits an answer to, if any."""
        self.saga, effects = step(self.saga, event)
        following: AwaitedEffect | None = None
        for effect in effects:
            if type(effect) is Emit:
                self.emitted.extend(effect.tokens)
                self._output.write_tokens(self._index, effect.tokens, effect.logprobs)
            elif isinstance(effect, (AskRouter, Dispatch, PauseSearch)):
                following = effect
            else:
                self._carry_out(effect)
        return following

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case RecordEvent():
                self._record.write(effect.event)
                if isinstance(effect.event, RequestStepped):
                    self._log_setback(effect.event)
            case CancelAttempt():
                self._workers.cancel(effect.worker, effect.epoch, effect.attempt, fetched=effect.fetched)
                if self._followed is not None and effect.attempt == self._followed[1]:
                    self._workers.forget(self._followed[0])
                    self._followed = None
            case Detach(follows=True):
                self._followed = (self._handle, self.saga.attempt.name)
            case Detach():
                self._workers.forget(self._handle)
            case AskStatus():
                metrics.FRAME_GAPS.inc()
                self._query_status()
            case Finish():
                self.error = effect.error
                if effect.error is not None and effect.error.code == ENDED_WORKERS:
                    _log.error(
                        "request_ended_workers",
                        **self._record.log_fields,
                        choice=self._index,
                        workers=self.saga.deaths,
                        reason=effect.error.logged,
                    )
                if self._move is not None and self.saga.awaits in ("route", "pause"):
                    self._move.cancel()
                self._output.write_end(self._index)
            case _:
                raise AssertionError(effect)

    def _move_on(self, following: AwaitedEffect | None) -> None:
        """Continue a search for a worker in a task of its own."""
        if following is None:
            return
        try:
            self._move = self._workers.spawn(self._pursue(following), "move")
        except ApiError as error:
            self.abort(error)

    async def _pursue(self, effect: AwaitedEffect | None) -> None:
        """Carry out effects whose answers lead to further ones, until the saga awaits nothing more from here."""
        # A move begins in the task that receives the frames of all requests.
        structlog.contextvars.bind_contextvars(**self._record.log_fields)
        while effect is not None:
            match effect:
                case AskRouter():
                    event: SagaEvent = await self._messages.query_router(effect, self.emitted)
                case Dispatch():
                    for encoded in await self._messages.encode_images(effect.attempt):
                        self._record.write(encoded)
                    if self.saga.end is not None:
                        return
                    # Its frames may arrive before its reply does.
                    self._heard_s, self._unanswered = self._clock.monotonic_s(), 0
                    self._handle = self._workers.adopt(self)
                    leg, position = effect.attempt, self._log_position
                    _log.debug("leg_sent", attempt=leg.name, worker=leg.worker, log_position=position)
                    event = await self._messages.send_leg(effect, self._handle, self.emitted)
                case PauseSearch():
                    await self._clock.sleep(effect.seconds)
                    event = RetryDue(effect.number, self._clock.monotonic_s())
                case _:
                    assert_never(effect)
            effect = self.feed(event)

    # Status queries.

    def _query_status(self) -> None:
        if not self._querying:
            self._querying = True
            self._workers.spawn(self._query(), "status")

    async def _query(self) -> None:
        """One query, and what follows from its reply."""
        structlog.contextvars.bind_contextvars(**self._record.log_fields)
        attempt = self.saga.attempt
        number, worker = attempt.number, attempt.worker
        query = StatusQuery(attempt.name, self.saga.received)
        try:
            reply = await self._workers.status(worker, attempt.epoch, query)
        except NoResponder:
            self._lose(number, f"worker {worker}: no process responds for it")
            return
        except BusError as error:
            _log.info("status_unanswered", attempt=attempt.name, worker=worker, reason=str(error))
            self._unanswered += self.saga.attempt.number == number
            if self._unanswered >= UNANSWERED_MAX:
                self._lose(number, f"worker {worker}: it stopped replying")
            return
        finally:
            self._querying = False
        if not reply.known:
            self._lose(number, f"worker {worker}: it does not have the request", died=False)
        elif reply.entry is not None and self.saga.streaming and self.saga.attempt.number == number:
            self._unanswered = 0
            self.receive(reply.entry, self._clock.monotonic_s())

    def _lose(self, number: int, reason: str, *, died: bool = True) -> None:
        self._move_on(self.feed(LegLost(number, reason, self._clock.monotonic_s(), died)))

    @property
    def _log_position(self) -> int:
        """The log position at which the router chose the worker."""
        return self.saga.decision.position if self.saga.decision is not None else 0

    def _log_setback(self, event: RequestStepped) -> None:
        metrics.SETBACKS.labels(event.before, event.cause).inc()
        log = _log.warning if event.cause in ("lost", "timed out") else _log.info
        log(
            "request_migrated",
            **self._record.log_fields,
            choice=event.choice,
            state=event.before,
            cause=event.cause,
            worker=event.worker,
            reason=event.reason,
            emitted_tokens=self.saga.emitted,
            migrations=self.saga.migrations,
            log_position=self._log_position,
        )
