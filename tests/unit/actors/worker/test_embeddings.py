"""A worker's side of embeddings: what it takes at once, what it refuses, and that it always gives one answer."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from headwater.actors.edge.saga.workers import MediaHolder
from headwater.actors.runtime.ports import MemoryBus
from headwater.actors.worker.handoffs import Handoffs
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.jobs import REPLY_BYTES_MAX, PoolingRequests
from headwater.actors.worker.lora import LoraGate
from headwater.actors.worker.media import MediaCache
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EngineError, NotSupported
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.schemas import subjects
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import Cancel, Embedded, EmbedReply, EmbedRequest, Refused, WaitingEdge
from headwater.schemas.media import PromptMedia
from tests.support.worlds.clock import ManualClock, settle

_reply: msgspec.msgpack.Decoder[EmbedReply] = msgspec.msgpack.Decoder(EmbedReply)
PROMPT = pack_tokens([1, 2, 3])


class Gated(SimEngine):
    """Answers once the gate is open: with vectors, or by raising."""

    def __init__(self) -> None:
        super().__init__(SimSettings(), ManualClock())
        self.gate = asyncio.Event()
        self.answer: tuple[bytes, ...] | Exception = (b"\0" * 16,)
        self.asked: list[EmbedRequest] = []

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        self.asked.append(request)
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Worker:
    """The handler on a bus, with what it told of its requests."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.engine = Gated()
        self.status = WorkerStatus("w", WorkerProfile(), asyncio.Event())
        clock = ManualClock()
        gate = LoraGate(self.engine, self._spawn)
        self.inflight = Inflight(clock, gate, Handoffs("w", clock, self.engine.choreography))
        media = MediaCache(self.bus, "ns")
        self.handler = PoolingRequests(self.bus, self.engine, self._spawn, self.status, self.inflight, media)
        self._told: list[tuple[str, bool]] = []

    def _spawn(self, work: Coroutine[Any, Any, None], _: str) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    @property
    def told(self) -> list[tuple[str, bool]]:
        """What was reported of requests so far: each with whether it has ended."""
        progress = self.inflight.take_progress()
        self._told += [(name, False) for name in progress.accepted]
        self._told += [(name, True) for name in progress.finished]
        return self._told

    async def idle(self) -> bool:
        """Is the worker drained now?"""
        return await self.inflight.drained_within(0.01, asyncio.Event())

    async def ask(self, name: str = "r1", prompts: int = 1) -> EmbedReply:
        """One request."""
        data = msgspec.msgpack.encode(EmbedRequest(name, (PROMPT,) * prompts))
        answer = await self.bus.request("embed", data, timeout_s=5.0)
        return _reply.decode(answer)

    def start(self, name: str) -> "asyncio.Task[EmbedReply]":
        """One request, not waited for."""
        return asyncio.create_task(self.ask(name))

    async def cancel(self, *names: str) -> None:
        """As an edge does."""
        await self.bus.publish("cancel", msgspec.msgpack.encode(Cancel(names)))
        await settle()


@asynccontextmanager
async def listening() -> AsyncIterator[Worker]:
    """A worker that takes requests."""
    worker = Worker()
    subscriptions = [
        await worker.bus.subscribe("embed", worker.handler.on_request),
        await worker.bus.subscribe("cancel", worker.handler.on_cancel),
    ]
    try:
        yield worker
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()


async def test_a_request_is_counted_from_when_it_is_taken_until_it_is_answered() -> None:
    """And the worker is idle only without one."""
    async with listening() as worker:
        asked = worker.start("r1")
        await settle()
        assert (len(worker.inflight), worker.told, await worker.idle()) == (1, [("r1", False)], False)
        worker.engine.gate.set()
        assert await asked == Embedded((b"\0" * 16,))
        assert (len(worker.inflight), worker.told[1:], await worker.idle()) == (0, [("r1", True)], True)


@pytest.mark.parametrize(
    ("answer", "reason", "retryable"),
    [
        (NotSupported("sim", "embed"), "capability 'embed'", False),
        (EngineError("out of memory"), "out of memory", True),
        (KeyError("x"), "the engine failed", True),
        ((), "0 vectors for 1", True),
        ((b"\0" * (REPLY_BYTES_MAX + 4),), "a message at most", False),
    ],
)
async def test_whatever_the_engine_does_there_is_an_answer(
    answer: tuple[bytes, ...] | Exception, reason: str, retryable: bool
) -> None:
    """Also for what no message can hold; and the request is over."""
    async with listening() as worker:
        worker.engine.gate.set()
        worker.engine.answer = answer
        reply = await worker.ask()
        assert isinstance(reply, Refused)
        assert reason in reply.reason
        assert reply.retryable == retryable
        assert worker.told == [("r1", False), ("r1", True)]


async def test_what_can_not_be_taken_is_refused_at_once() -> None:
    """While it drains, too many, unreadable: nothing of it is counted."""
    async with listening() as worker:
        asked = [worker.start(f"r{number}") for number in range(PoolingRequests.active_max)]
        await settle()
        for refusal, name, says in (("", "more", "256 requests"), ("worker w drains", "x", "drains")):
            worker.status.failure_reason = refusal
            reply = await worker.ask(name)
            assert isinstance(reply, Refused)
            assert reply.retryable
            assert says in reply.reason
        reply = _reply.decode(await worker.bus.request("embed", b"\xc1", timeout_s=5.0))
        assert isinstance(reply, Refused)
        assert not reply.retryable
        assert len(worker.told) == PoolingRequests.active_max
        worker.engine.gate.set()
        assert all(isinstance(one, Embedded) for one in await asyncio.gather(*asked))


async def test_a_copy_of_a_message_counts_for_nothing() -> None:
    """While the first one is computed, and after its answer: a router would count a second one for ever."""
    async with listening() as worker:
        asked = worker.start("r")
        await settle()
        copies = [worker.start("r")]
        await settle()
        worker.engine.gate.set()
        assert isinstance(await asked, Embedded)
        copies.append(worker.start("r"))
        await settle()
        assert worker.told == [("r", False), ("r", True)]
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def test_a_cancelled_request_ends_and_others_go_on() -> None:
    """Nobody reads its answer any more; unknown names are passed over. All end at the end of a life."""
    async with listening() as worker:
        asked = [worker.start(name) for name in ("a", "b", "c")]
        await settle()
        await worker.cancel("b", "nobody")
        assert len(worker.inflight) == 2
        assert ("b", True) in worker.told
        worker.handler.abort_all()
        await settle()
        assert await worker.idle()
        assert len(worker.told) == 6
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_media_come_from_the_edge_that_waits() -> None:
    """Those of each prompt; one that has gone may have sent the request to another worker, too."""
    pixels = bytes(range(12))
    item = PromptMedia("image", "a" * 32, 1, 1, (2, 2, 3))
    request = EmbedRequest("r1", (PROMPT, PROMPT), waiter=WaitingEdge("e1", 1, 1), media=((), (item,)))
    async with listening() as worker:
        worker.engine.gate.set()
        worker.engine.answer = (b"\0" * 16,) * 2

        async def ask(request: EmbedRequest) -> EmbedReply:
            data = await worker.bus.request("embed", msgspec.msgpack.encode(request), timeout_s=5.0)
            return _reply.decode(data)

        gone = await ask(request)
        assert isinstance(gone, Refused)
        assert gone.retryable
        assert not worker.engine.asked
        holder = MediaHolder(worker.bus)
        subscription = await worker.bus.subscribe(subjects.edge_media("ns", "e1"), holder.on_query)
        with holder.hold([(item.id, memoryview(pixels))]):
            assert isinstance(await ask(msgspec.structs.replace(request, request="r2")), Embedded)
        await subscription.unsubscribe()
    [asked] = worker.engine.asked
    assert asked.media == ((), (msgspec.structs.replace(item, data=pixels),))
