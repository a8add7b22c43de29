"""Generation requests: accepting them into the engine, claiming and releasing hand-offs, cancelling, status queries.

A request is accepted at once, except a decode leg, which first claims the KV of its prompt from the worker that computed
it, and a request with images, which are first fetched from the edge. Both run in a task of their own, and the request is answered when they are done.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import structlog

from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.ports import BusError, Message, NoResponder, Ports
from headwater.actors.worker.handoffs import Edge, Handoffs, Reach, RequestsByEdge, UnclaimedKv
from headwater.actors.worker.inflight import Inflight, LoadSource, WorkerStatus
from headwater.actors.worker.media import MediaCache, MediaMissing
from headwater.actors.worker.token_frames import FrameSender
from headwater.engines.engine import (
    DEATHS,
    Aborts,
    Emit,
    EngineDied,
    EngineError,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.engines.logs import failure_place
from headwater.schemas import subjects
from headwater.schemas.inference import (
    Accepted,
    Cancel,
    Choreography,
    GenerateReply,
    GenerateRequest,
    Handoff,
    HandoffClaim,
    HandoffGranted,
    HandoffReply,
    Refused,
    StatusQuery,
    prompt_digest,
)
from headwater.schemas.media import PromptMedia

CLAIM_TIMEOUT_S = 2.0
EXPIRE_PERIOD_S = 0.5


class GenerationEngine(LoadSource, Protocol):
    """The part of an engine that generates: see `Engine`."""

    choreography: Choreography
    aborts: Aborts
    notices_fetches: bool

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        ...

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        ...

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        ...


class EmbeddingSource(Protocol):
    """The source of images' embeddings: see `headwater.actors.worker.encoding`."""

    async def read(self, media: Sequence[PromptMedia]) -> bool:
        """Read those on offer; returns whether the engine needs no pixels of these images."""
        ...

    async def put_given(self, media: tuple[PromptMedia, ...]) -> tuple[PromptMedia, ...]:
        """Give the engine the embeddings that a client sent; returns the media as the engine takes them. Raises `EngineError`."""
        ...


_encode = msgspec.msgpack.Encoder().encode
_generate = msgspec.msgpack.Decoder(GenerateRequest)
_cancel = msgspec.msgpack.Decoder(Cancel)
_status = msgspec.msgpack.Decoder(StatusQuery)
_claim = msgspec.msgpack.Decoder(HandoffClaim)
_claimed: msgspec.msgpack.Decoder[HandoffReply] = msgspec.msgpack.Decoder(HandoffReply)

_log = structlog.get_logger("headwater.intake")


class RequestIntake:
    """The generation requests of one worker, over all its incarnations, counted in `inflight`."""

    def __init__(
        self,
        ports: Ports,
        name: str,
        engine: GenerationEngine,
        spawn: Spawn,
        status: WorkerStatus,
        embeddings: EmbeddingSource | None = None,
    ) -> None:
        self.handoffs = Handoffs(
            name, ports.clock, engine.choreography, notices_fetches=engine.notices_fetches
        )
        self.inflight = Inflight(ports.clock, engine, self.handoffs)
        self.frames = FrameSender(ports.bus, ports.ns, name, self.inflight.record_engine_step)
        self._ports = ports
        self._name = name
        self._engine = engine
        self._spawn = spawn
        self._status = status
        self.media = MediaCache(ports.bus, ports.ns)
        self._reach = Reach(ports.clock)
        self._embeddings = embeddings
        self._claiming: dict[str, bool] = {}
        """Requests that wait for their images or, as decode legs, for their KV: are they still wanted?"""
        self._fetching: dict[str, bool] = {}
        """Decode legs in an engine that may not abort them before their first token: is the request still wanted?"""

    def begin_incarnation(self, epoch: int) -> None:
        """A new incarnation: what the earlier one reported and offered is void."""
        self.frames.epoch = epoch
        self.inflight.begin_incarnation()
        self._release_kv(self.handoffs.begin_incarnation(epoch))

    async def on_generate(self, message: Message) -> None:
        """Accept a request, or refuse it."""
        try:
            request = _generate.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._reply(message, Refused(f"unreadable request: {error}", False))
        if request.request in self._claiming:
            # A duplicate: the first copy is yet to be answered, and there is one answer.
            return None
        # Names of attempts are unique: a name that is seen again, however late, is the same attempt.
        if self.frames.has_stream(request.request):
            return await self._reply(message, Accepted())
        refusal = self._status.refusal()
        if refusal:
            return await self._reply(message, self._status.refuse(refusal))
        if request.handoff is None and not request.media:
            return await self._reply(message, self._submit(request, None))
        self._claiming[request.request] = True
        self._spawn(self._prepare_and_submit(message, request), "claim")
        return None

    async def _reply(self, message: Message, reply: GenerateReply) -> None:
        await self._ports.bus.publish(message.reply, _encode(reply))

    async def _prepare_and_submit(self, message: Message, request: GenerateRequest) -> None:
        """Fetch what the request needs: its images or their embeddings, and the KV of its prompt."""
        structlog.contextvars.bind_contextvars(
            attempt=request.request, trace=request.trace.trace_of_attempt(request.request)
        )
        epoch = self.frames.epoch
        handoff = request.handoff
        reply: GenerateReply = Refused(f"worker {self._name} failed to prepare it", True, handoff is not None)
        try:
            refused: Refused | None = None
            transfer: Transfer | None = None
            try:
                if self._embeddings is None or not await self._embeddings.read(request.media):
                    media = await self.media.load(request.edge, request.media)
                    if self._embeddings is not None:
                        media = await self._embeddings.put_given(media)
                    request = msgspec.structs.replace(request, media=media)
            except (MediaMissing, EngineError) as error:
                refused = Refused(str(error), True)
            if handoff is not None and refused is None:
                refused, transfer = await self._claim_kv(request, handoff)
            spent = transfer is not None
            refusal = self._status.refusal()
            if refused is not None:
                reply = refused
            elif not self._claiming[request.request]:
                reply = Refused("it was cancelled while it was prepared", True, spent)
            elif epoch != self.frames.epoch or refusal:
                reason = refusal or f"worker {self._name} started a new incarnation during that"
                reply = self._status.refuse(reason, spent=spent)
            else:
                reply = self._submit(request, transfer)
        finally:
            del self._claiming[request.request]
            await self._reply(message, reply)

    async def _claim_kv(
        self, request: GenerateRequest, handoff: Handoff
    ) -> tuple[Refused | None, Transfer | None]:
        """The parameters of the KV, from the worker that keeps it. It grants them once, and for this prompt only."""
        subject = subjects.engine(self._ports.ns, handoff.worker, handoff.epoch, "claim")
        digest = prompt_digest(request.lora_name, request.cache_salt, request.tokens, request.media)
        claim = HandoffClaim(handoff.id, digest, self._name, self.frames.epoch)
        try:
            data = await self._ports.bus.request(subject, _encode(claim), timeout_s=CLAIM_TIMEOUT_S)
            reply = _claimed.decode(data)
        except NoResponder:
            return Refused(f"worker {handoff.worker}, which keeps its KV, is gone", True, True), None
        except (BusError, msgspec.DecodeError) as error:
            return Refused(f"claiming its KV from worker {handoff.worker} failed: {error}", True, True), None
        if isinstance(reply, HandoffGranted):
            if unreached := await self._reach.refusal(handoff.worker, reply.place):
                _log.warning("handoff_unreachable", attempt=request.request, reason=unreached)
                return Refused(unreached, True, True), None
            return None, Transfer(reply.params, reply.first_tokens)
        _log.warning("handoff_denied", attempt=request.request, handoff=handoff.id, reason=reply.reason)
        return Refused(f"worker {handoff.worker} denied its KV: {reply.reason}", True, True), None

    def _submit(self, request: GenerateRequest, transfer: Transfer | None) -> GenerateReply:
        self.frames.open_stream(request)
        # Also for the engine's tasks that begin here. The context manager for this takes four times as long.
        bound = structlog.contextvars.bind_contextvars(
            attempt=request.request, trace=request.trace.trace_of_attempt(request.request)
        )
        try:
            self._engine.submit(request, self._emitter(request), transfer)
        except RequestRejected as error:
            self.frames.drop_stream(request.request)
            return Refused(str(error), error.retryable, transfer is not None, error.param)
        except EngineDied as error:
            self.frames.drop_stream(request.request)
            self._status.note_engine_death(str(error))
            return self._status.refuse(str(error), spent=transfer is not None)
        except Exception as error:
            # A bug in an engine's integration costs this request, and its edge must get an answer.
            _log.error("submit_failed", attempt=request.request, failure=failure_place(error))
            _log.debug("submit_failure", attempt=request.request, exc_info=True)
            self.frames.drop_stream(request.request)
            return Refused(
                f"the engine failed: {type(error).__name__}; see the worker's log", True, transfer is not None
            )
        finally:
            structlog.contextvars.reset_contextvars(**bound)
        if transfer is not None and self._engine.aborts == "not while fetching":
            self._fetching[request.request] = True
        self.inflight.accept(request, fetches=transfer is not None)
        _log.debug(
            "leg_accepted",
            attempt=request.request,
            trace=request.trace.trace_of_attempt(request.request),
            leg=request.leg,
            edge=request.edge,
        )
        return Accepted()

    def _abort(self, request: str) -> None:
        """Abort a request in the engine, as soon as that harms no other."""
        if request in self._fetching:
            self._fetching[request] = False
        elif self._engine.aborts != "never":
            self._engine.abort(request)

    def _emitter(self, request: GenerateRequest) -> Emit:
        """Called with each step of the request."""
        name, inflight, frames = request.request, self.inflight, self.frames
        is_prefill = request.leg == "prefill"
        is_first, handoff, tokens = True, None, 0

        def emit(step: Step) -> None:
            nonlocal is_first, handoff, tokens
            if step.finish in DEATHS:
                self._status.note_engine_death(step.detail)
            # A request of an earlier incarnation ended for the log with that incarnation.
            is_current = inflight.is_current(name)
            if is_first and is_current:
                is_first = False
                inflight.record_first_step(request, step)
            if step.pinned is not None:
                if is_current:
                    handoff = self.handoffs.offer(request, step.pinned, self._ports.ids())
                else:
                    self._release_kv([UnclaimedKv(name, step.pinned.params)])
            if name in self._fetching and (step.tokens or step.finish) and not self._fetching.pop(name):
                self._engine.abort(name)
            if is_prefill:
                frames.send_prefill(name, step, handoff)
            else:
                sent = frames.send_step(name, step)
                inflight.tokens += sent
                tokens += sent
            if step.finish:
                inflight.finish(request, step, tokens)
                _log.debug(
                    "leg_ended",
                    attempt=name,
                    trace=request.trace.trace_of_attempt(request.request),
                    reason=step.finish,
                    tokens=tokens,
                )
                if handoff is not None and step.finish not in ("stop", "length"):
                    # The prompt of a room was not computed: no worker is to enter it any more.
                    self._release_kv(self.handoffs.release(name))

        return emit

    async def on_cancel(self, message: Message) -> None:
        """Abort requests that no client waits for any more, and release the KV that they left for other workers."""
        cancel = _cancel.decode(message.data)
        for request in cancel.requests:
            if request in self._claiming:
                self._claiming[request] = False
            if not cancel.fetched:
                self._abort(request)
            self._release_kv(self.handoffs.release(request))

    async def on_status(self, message: Message) -> None:
        """Reply with the state of a request and the tokens that its edge missed."""
        query = _status.decode(message.data)
        reply = self.frames.status(query.request, query.received)
        await self._ports.bus.publish(message.reply, _encode(reply))

    async def on_claim(self, message: Message) -> None:
        """Another worker claims the KV of a prompt that was computed here."""
        reply = self.handoffs.claim(_claim.decode(message.data))
        await self._ports.bus.publish(message.reply, _encode(reply))

    async def expire_handoffs(self) -> None:
        """Release the KV of hand-offs that were not claimed in time. Does not return."""
        while True:
            await self._ports.clock.sleep(EXPIRE_PERIOD_S)
            self._release_kv(self.handoffs.expire())

    def requests_by_edge(self) -> RequestsByEdge:
        """See `EdgeRequests`."""
        return self.frames.streams_by_edge()

    def abort(self, requests: Sequence[str]) -> None:
        """See `EdgeRequests`. The KV that they left for other workers stays for its lease."""
        for request in requests:
            self._abort(request)

    def edges_of_kept_kv(self) -> list[Edge]:
        """See `KeptKv`."""
        return self.handoffs.edges()

    def release_kept_kv(self, edge: Edge) -> int:
        """See `KeptKv`."""
        released = self.handoffs.release_edge(edge)
        self._release_kv(released)
        return len(released)

    def abort_all(self) -> None:
        """Abort all requests and hand-offs that are not claimed: their edges migrate them.

        KV that another worker is fetching stays.
        """
        for request in self.frames.open_streams:
            self._abort(request)
        self._release_kv(self.handoffs.abandon())

    def fail_all(self, reason: str) -> int:
        """End all requests with an error, as their engine has failed. Returns how many there were."""
        requests = self.frames.open_streams
        for request in requests:
            self.frames.send_step(request, Step((), "died", detail=reason))
        return len(requests)

    def _release_kv(self, unclaimed: list[UnclaimedKv]) -> None:
        for kv in unclaimed:
            self._spawn(self._release(kv), "release")
        self.inflight.note_closed_handoffs()

    async def _release(self, kv: UnclaimedKv) -> None:
        try:
            await self._engine.release(kv.request, kv.params)
        except EngineError as error:
            # The engine's own lease on it ends too.
            _log.warning("kv_release_failed", attempt=kv.request, reason=str(error))


# The reply of a worker whose engine fails on a request that has no stream of tokens.

ABORTED: Final = Refused("the worker aborted it", True)

_refusals_log = structlog.get_logger("headwater.worker")


def refusal_of(error: Exception, request: str, status: WorkerStatus, *, fatal: bool = False) -> Refused:
    """The reply to a request whose call of the engine raised `error`; a bug counts as its death if `fatal`.

    A bug in an engine's integration costs this request, not the worker with all others. The death of the engine is noted in
    `status`: the worker refuses what comes next.
    """
    if isinstance(error, RequestRejected):
        return Refused(str(error), error.retryable, param=error.param)
    if isinstance(error, EngineDied):
        status.note_engine_death(str(error))
        return Refused(str(error), True, fatal=True, gone=True)
    if isinstance(error, EngineError | MediaMissing):
        return Refused(str(error), True)
    _refusals_log.error("engine_call_failed", attempt=request, failure=failure_place(error))
    _refusals_log.debug("engine_call_failure", exc_info=error)
    return Refused(f"the engine failed: {type(error).__name__}; see the worker's log", True, fatal=fatal)
