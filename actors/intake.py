"""What a worker does with requests: take them into the engine, hand prompts over, cancel, and tell how they stand.

A request is taken at once, but for a decode leg: that first claims the KV of its prompt from the worker that computed
it. This runs beside everything else, and the request is answered when it is done.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
import structlog

from headwater.actors.bus_port import BusError, Message, NoResponder
from headwater.actors.frames import FrameSender
from headwater.actors.handoffs import GivenUp, Handoffs
from headwater.actors.progress import Loaded, Progress, Tracker
from headwater.actors.world import World
from headwater.engines.engine import Emit, EngineError, RequestRejected, Step, Transfer
from headwater.schemas import subjects
from headwater.schemas.handoff import (
    Choreography,
    Handoff,
    HandoffClaim,
    HandoffGranted,
    HandoffReply,
    prompt_digest,
)
from headwater.schemas.inference import (
    Accepted,
    Cancel,
    GenerateReply,
    GenerateRequest,
    Refused,
    StatusQuery,
)

CLAIM_TIMEOUT_S = 2.0
EXPIRE_PERIOD_S = 0.5


class Submits(Loaded, Protocol):
    """What of an engine is needed here: see `Engine`."""

    choreography: Choreography

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        ...

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        ...

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        ...


Spawn = Callable[[Coroutine[Any, Any, None], str], object]

_encode = msgspec.msgpack.Encoder().encode
_generate = msgspec.msgpack.Decoder(GenerateRequest)
_cancel = msgspec.msgpack.Decoder(Cancel)
_status = msgspec.msgpack.Decoder(StatusQuery)
_claim = msgspec.msgpack.Decoder(HandoffClaim)
_claimed: msgspec.msgpack.Decoder[HandoffReply] = msgspec.msgpack.Decoder(HandoffReply)

_log = structlog.get_logger("headwater.intake")


class Intake:
    """See the module. One for all lives of a worker; `begin` starts one.

    `refuses` says why nothing is taken at present, "" where something is.
    """

    def __init__(
        self, world: World, name: str, engine: Submits, spawn: Spawn, refuses: Callable[[], str]
    ) -> None:
        self.frames = FrameSender(world.bus, world.ns, name)
        self.handoffs = Handoffs(name, world.clock, engine.choreography)
        self.held: dict[str, None] = {}
        self.moved = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._world = world
        self._name = name
        self._engine = engine
        self._spawn = spawn
        self._refuses = refuses
        self._preparing: dict[str, bool] = {}
        self.progress = self._tracked()

    def begin(self, epoch: int) -> None:
        """A new life of the worker: what the log and the other workers were told before is void."""
        self.frames.epoch = epoch
        self.held, self.progress = {}, self._tracked()
        self._give_up(self.handoffs.begin(epoch))

    def _tracked(self) -> Tracker:
        tracker = Tracker(self._world.clock, self._engine, self.moved, self.frames.tokens)
        self.frames.stepped = tracker.clock.stepped
        return tracker

    def take_progress(self) -> Progress:
        """Which requests moved on since the last call, and how fast."""
        return self.progress.take(self.frames.tokens)

    async def on_generate(self, message: Message) -> None:
        """Take a request, or say why not."""
        try:
            request = _generate.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._answer(message, Refused(f"unreadable request: {error}", False))
        if request.request in self._preparing:
            # Sent twice: the first is still to be answered, and there is one answer.
            return None
        # Names of attempts are unique: one that comes again, however late, is the same one.
        known = self.frames.knows(request.request)
        refusal = "" if known else self._refuses()
        if known or refusal:
            return await self._answer(message, Refused(refusal, True) if refusal else Accepted())
        if request.handoff is None:
            return await self._answer(message, self._take(request, None))
        self._preparing[request.request] = True
        self._spawn(self._claim_first(message, request, request.handoff), "claim")
        return None

    async def _answer(self, message: Message, reply: GenerateReply) -> None:
        await self._world.bus.publish(message.reply, _encode(reply))

    async def _claim_first(self, message: Message, request: GenerateRequest, handoff: Handoff) -> None:
        epoch = self.frames.epoch
        reply: GenerateReply = Refused(f"worker {self._name} failed to prepare it", True, True)
        try:
            refused, transfer = await self._claim(request, handoff)
            spent = transfer is not None
            if refused is not None:
                reply = refused
            elif not self._preparing[request.request]:
                reply = Refused("it was cancelled meanwhile", True, spent)
            elif epoch != self.frames.epoch or self._refuses():
                reply = Refused(self._refuses() or f"worker {self._name} began a new life", True, spent)
            else:
                reply = self._take(request, transfer)
        finally:
            del self._preparing[request.request]
            await self._answer(message, reply)

    async def _claim(
        self, request: GenerateRequest, handoff: Handoff
    ) -> tuple[Refused | None, Transfer | None]:
        """The KV's parameters from the worker that holds it. They are given once, and to this prompt only."""
        subject = subjects.engine(self._world.ns, handoff.worker, handoff.epoch, "claim")
        digest = prompt_digest(request.lora_name, request.cache_salt, request.tokens)
        claim = HandoffClaim(handoff.id, digest, self._name, self.frames.epoch)
        try:
            data = await self._world.bus.request(subject, _encode(claim), timeout_s=CLAIM_TIMEOUT_S)
            reply = _claimed.decode(data)
        except NoResponder:
            return Refused(f"worker {handoff.worker}, which has its KV, is gone", True, True), None
        except (BusError, msgspec.DecodeError) as error:
            return Refused(
                f"its KV can not be claimed from worker {handoff.worker}: {error}", True, True
            ), None
        if isinstance(reply, HandoffGranted):
            return None, Transfer(reply.params, reply.first_tokens)
        _log.warning("handoff_denied", request=request.request, handoff=handoff.id, reason=reply.reason)
        return Refused(f"worker {handoff.worker} denies its KV: {reply.reason}", True, True), None

    def _take(self, request: GenerateRequest, transfer: Transfer | None) -> GenerateReply:
        self.frames.open(request)
        epoch = self.frames.epoch
        prefill = request.leg == "prefill"
        first, handoff = True, None

        def emit(step: Step) -> None:
            nonlocal first, handoff
            # What a life before this one took ended for the log when that life did.
            mine = epoch == self.frames.epoch
            if first and mine:
                first = False
                self.progress.first(request, step)
            if step.pinned is not None and mine:
                handoff = self.handoffs.offer(request, step.pinned, self._world.ids())
            elif step.pinned is not None:
                self._give_up([GivenUp(request.request, step.pinned.params)])
            if prefill:
                self.frames.prefilled(request.request, step, handoff)
            else:
                self.frames.step(request.request, step)
            if step.finish:
                if mine:
                    self.held.pop(request.request, None)
                    self.progress.end(request, step)
                self._note_idle()

        try:
            self._engine.submit(request, emit, transfer)
        except RequestRejected as error:
            self.frames.active.pop(request.request, None)
            return Refused(str(error), error.retryable, transfer is not None, error.param)
        except Exception as error:
            # A mistake in an adapter costs this request, and its edge must have an answer.
            _log.exception("submit_failed", request=request.request)
            self.frames.active.pop(request.request, None)
            return Refused(f"the engine failed: {type(error).__name__}: {error}", True, transfer is not None)
        self.idle.clear()
        self.held[request.request] = None
        self.progress.accept(request, fetches=transfer is not None)
        return Accepted()

    def account(self, request: str, *, ended: bool) -> None:
        """A request of another kind began or ended. What a life before this one took ended with that for the log."""
        if not ended:
            self.held[request] = None
            self.progress.other(request, ended=False)
        elif request in self.held:
            del self.held[request]
            self.progress.other(request, ended=True)

    def _note_idle(self) -> None:
        if not self.frames.active and not self.handoffs:
            self.idle.set()

    async def on_cancel(self, message: Message) -> None:
        """Nobody reads these any more: stop them, and give up what they left for others."""
        for request in _cancel.decode(message.data).requests:
            if request in self._preparing:
                self._preparing[request] = False
            self._engine.abort(request)
            given_up = self.handoffs.end(request)
            self._give_up([given_up] if given_up is not None else [])

    async def on_status(self, message: Message) -> None:
        """How a request stands, and what an edge missed of it."""
        query = _status.decode(message.data)
        reply = self.frames.status(query.request, query.received)
        await self._world.bus.publish(message.reply, _encode(reply))

    async def on_claim(self, message: Message) -> None:
        """Another worker wants the KV of a prompt that was computed here."""
        reply = self.handoffs.claim(_claim.decode(message.data))
        await self._world.bus.publish(message.reply, _encode(reply))

    async def expire(self) -> None:
        """Give up hand-offs that nobody claimed in time, for ever."""
        while True:
            await self._world.clock.sleep(EXPIRE_PERIOD_S)
            self._give_up(self.handoffs.expire())

    def _give_up(self, given_up: list[GivenUp]) -> None:
        for one in given_up:
            self._spawn(self._release(one), "release")
        self._note_idle()

    def forsake(self) -> None:
        """Give up every hand-off that nobody has claimed yet: those edges have the prompt computed again."""
        self._give_up(self.handoffs.forsake())

    async def _release(self, one: GivenUp) -> None:
        try:
            await self._engine.release(one.request, one.params)
        except EngineError as error:
            # The engine's own lease on it ends too.
            _log.warning("kv_not_released", request=one.request, reason=str(error))
