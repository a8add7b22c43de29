"""What a worker does with prompts to pool into vectors: beside the requests that generate, counted like them.

The engine computes for as long as it takes, so each request runs in a task of its own, and its answer comes when it is
done. An edge that no longer wants it cancels it like any other request.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import msgspec
import structlog

from headwater.actors.bus_port import Bus, BusError, Message
from headwater.engines.engine import Engine, EngineError, RequestRejected
from headwater.schemas.inference import Cancel, Embedded, EmbedReply, EmbedRequest, Refused

ACTIVE_MAX: Final = 256
"""Requests at once; one more is refused, and its edge asks another worker."""

REPLY_BYTES_MAX: Final = 768 * 1024
"""An answer is one message, and a NATS server takes 1 MiB by default."""

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]

_encode = msgspec.msgpack.Encoder().encode
_embed = msgspec.msgpack.Decoder(EmbedRequest)
_cancel = msgspec.msgpack.Decoder(Cancel)
_log = structlog.get_logger("headwater.embedding")


class Account(Protocol):
    """Where a request is counted, for the log: taken, and ended."""

    def __call__(self, request: str, *, ended: bool) -> None:
        """Once each, in this order, in whatever life of the worker."""
        ...


class Embedding:
    """See the module. `refuses` says why nothing is taken at present, "" where something is."""

    def __init__(
        self, bus: Bus, engine: Engine, spawn: Spawn, refuses: Callable[[], str], account: Account
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._spawn = spawn
        self._refuses = refuses
        self._account = account
        self._active: dict[str, tuple[asyncio.Task[None], Message]] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._active)

    @property
    def active(self) -> list[str]:
        """Names of the requests under way."""
        return list(self._active)

    async def on_embed(self, message: Message) -> None:
        """Take a request, or say why not. The answer comes when the engine has it."""
        try:
            request = _embed.decode(message.data)
        except msgspec.DecodeError as error:
            return await self._answer(message, Refused(f"unreadable request: {error}", False))
        refusal = self._refuses()
        if not refusal and request.request in self._active:
            refusal = f"{request.request} is under way already"
        if not refusal and len(self._active) >= ACTIVE_MAX:
            refusal = f"it pools for {ACTIVE_MAX} requests already"
        if refusal:
            return await self._answer(message, Refused(refusal, True))
        task = self._spawn(self._work(message, request), "embed")
        self._active[request.request] = (task, message)
        self.idle.clear()
        self._account(request.request, ended=False)
        # Not at the end of the work: a task may be cancelled before it begins.
        task.add_done_callback(lambda _: self._ended(request.request))
        return None

    async def on_cancel(self, message: Message) -> None:
        """Nobody wants these any more."""
        for request in _cancel.decode(message.data).requests:
            if request in self._active:
                self._active[request][0].cancel()

    def cancel_all(self) -> None:
        """Stop what runs, and say so: the edges have it done elsewhere."""
        for task, message in list(self._active.values()):
            task.cancel()
            # A worker that only sleeps keeps its lease: nothing else would tell the edge.
            self._spawn(self._tell_given_up(message), "given up")

    async def _tell_given_up(self, message: Message) -> None:
        try:
            await self._answer(message, Refused("the worker gave it up", True))
        except BusError as error:
            _log.warning("embedding_not_sent", reason=str(error))

    async def _work(self, message: Message, request: EmbedRequest) -> None:
        reply: EmbedReply
        try:
            vectors = await self._engine.embed(request)
            reply = _fitting(request, vectors)
        except RequestRejected as error:
            reply = Refused(str(error), False)
        except EngineError as error:
            reply = Refused(str(error), True)
        except Exception as error:
            # A mistake in an adapter costs this request, not the worker with all that it has.
            _log.exception("embedding_failed", request=request.request)
            reply = Refused(f"the engine failed: {error}", True)
        try:
            await self._answer(message, reply)
        except BusError as error:
            _log.warning("embedding_not_sent", request=request.request, reason=str(error))

    def _ended(self, request: str) -> None:
        del self._active[request]
        self._account(request, ended=True)
        if not self._active:
            self.idle.set()

    async def _answer(self, message: Message, reply: EmbedReply) -> None:
        await self._bus.publish(message.reply, _encode(reply))


def _fitting(request: EmbedRequest, vectors: tuple[bytes, ...]) -> EmbedReply:
    """The vectors, if they are what was asked for and one message can hold them."""
    if len(vectors) != len(request.prompts):
        return Refused(f"the engine gave {len(vectors)} vectors for {len(request.prompts)} prompts", True)
    size = sum(len(vector) for vector in vectors)
    if size > REPLY_BYTES_MAX:
        return Refused(f"the vectors have {size} bytes, a message at most {REPLY_BYTES_MAX}", False)
    return Embedded(vectors)
