"""When a request that nobody waits for is aborted: as soon as its engine can, and not before."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from headwater.actors.runtime.ports import Message
from headwater.actors.worker.inflight import WorkerStatus
from headwater.actors.worker.requests import RequestIntake
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import Aborts, Emit, EngineLoad, Pinned, Step, Transfer
from headwater.schemas import subjects
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import (
    Cancel,
    Choreography,
    GenerateRequest,
    Handoff,
    HandoffGranted,
    Leg,
    Sampling,
)
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.memory import memory_world

_encode = msgspec.msgpack.encode


class Recorder:
    """An engine that does nothing by itself, and notes what it is asked to abort."""

    choreography: Choreography = "room"
    notices_fetches = True

    def __init__(self, aborts: Aborts) -> None:
        self.aborts: Aborts = aborts
        self.emits: dict[str, Emit] = {}
        self.aborted: list[str] = []
        self.released: list[str] = []

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        self.emits[request.request] = emit

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        self.aborted.append(request)

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self.released.append(request)

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return EngineLoad(0, 0, 0, 1)

    def is_waiting(self, request: str) -> bool:
        """See `LoadSource.is_waiting`."""
        return False


class Worker:
    """A worker's intake with such an engine; another worker grants every claim."""

    def __init__(self, aborts: Aborts) -> None:
        self.world = memory_world(ManualClock())
        self.engine = Recorder(aborts)
        status = WorkerStatus("w", WorkerProfile(), asyncio.Event())
        self.intake = RequestIntake(self.world, "w", self.engine, self._spawn, status)

    def _spawn(self, work: Coroutine[Any, Any, None], _: str) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    async def give(self, name: str, leg: Leg = "") -> None:
        """A request, or a decode leg with KV to claim."""
        handoff = Handoff("h", "p", 1, b"", 2, 1_000) if leg == "decode" else None
        tokens = pack_tokens([1, 2])
        request = GenerateRequest(name, "e", 1, tokens, Sampling(4), leg=leg, handoff=handoff, edge_epoch=7)
        await self.intake.on_generate(Message("generate", _encode(request), "reply"))
        while name not in self.engine.emits:
            await asyncio.sleep(0)

    async def cancel(self, name: str, *, fetched: bool = False) -> None:
        """Its client has left, or its KV was fetched."""
        await self.intake.on_cancel(Message("cancel", _encode(Cancel((name,), fetched)), ""))


async def worker(aborts: Aborts) -> Worker:
    """With a decode leg `d` and a whole request `r`, neither of which has a token."""
    made = Worker(aborts)

    async def grant(message: Message) -> None:
        await made.world.bus.publish(message.reply, _encode(HandoffGranted(b"")))

    await made.world.bus.subscribe(subjects.engine("ns", "p", 1, "claim"), grant)
    await made.give("d", "decode")
    await made.give("r")
    return made


@pytest.mark.parametrize(
    ("aborts", "at_once"), [("anytime", ["d", "r"]), ("not while fetching", ["r"]), ("never", [])]
)
async def test_an_engine_is_asked_to_abort_when_it_can(aborts: Aborts, at_once: list[str]) -> None:
    """A decode leg that has no token yet is left alone where its abort would cost blocks."""
    one = await worker(aborts)
    for name in ("d", "r"):
        await one.cancel(name)
    assert one.engine.aborted == at_once


async def test_an_abort_that_waits_follows_the_first_token() -> None:
    """Once, and only for a request that nobody wants; one that ends by itself is not aborted later."""
    one = await worker("not while fetching")
    await one.give("kept", "decode")
    await one.cancel("d")
    one.engine.emits["d"](Step(()))
    assert one.engine.aborted == []
    for name in ("d", "kept"):
        one.engine.emits[name](Step((7,)))
        one.engine.emits[name](Step((8,)))
    assert one.engine.aborted == ["d"]
    await one.cancel("kept")
    assert one.engine.aborted == ["d", "kept"], "it has its KV"


async def test_a_prefill_leg_whose_kv_was_fetched_ends_by_itself() -> None:
    """It may still be reporting its end: an abort would make a failure of it."""
    one = await worker("anytime")
    await one.cancel("r", fetched=True)
    assert one.engine.aborted == []


async def test_kv_that_is_kept_for_an_edge_goes_back_to_the_engine_when_that_is_gone() -> None:
    """Also after its prefill has ended, and once; another incarnation of that edge keeps its own."""
    made = Worker("anytime")
    await made.give("p", "prefill")
    made.engine.emits["p"](Step((), "length", pinned=Pinned(b"where the KV is", 30.0)))
    assert made.intake.edges_of_kept_kv() == [("e", 7)]
    assert [made.intake.release_kept_kv(edge) for edge in (("e", 8), ("e", 7), ("e", 7))] == [0, 1, 0]
    await asyncio.sleep(0)
    assert made.engine.released == ["p"]
    assert made.intake.edges_of_kept_kv() == []
