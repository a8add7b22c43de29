"""Requests on their way to an engine past the adapters that they need."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headwater.actors.worker.lora import LoraGate
from headwater.engines.engine import RequestRejected, Step
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling
from tests.support.worlds.clock import ManualClock, settle
from tests.support.worlds.lora import Worker, eventually, publish
from tests.support.worlds.memory import memory_world


class Gate:
    """A gate before a simulated engine, and what came back of each request."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.gate = LoraGate(worker.engine, self._spawn)
        self.gate.manager = worker.adapters
        self.steps: dict[str, list[Step]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def submit(self, name: str, lora_name: str = "", tokens: int = 8) -> list[Step]:
        """Send a request; returns its steps as they come."""
        steps = self.steps[name] = []
        packed = pack_tokens(list(range(tokens)))
        request = GenerateRequest(name, "e", 1, packed, Sampling(max_tokens=2), lora_name=lora_name)
        self.gate.submit(request, steps.append)
        assert not steps
        return steps

    def users(self, name: str) -> int:
        """Requests that count as using an adapter."""
        held = self.worker.adapters.slots.loaded.get(name)
        return held.users if held else 0

    async def ended(self, steps: list[Step]) -> Step:
        """The last step."""
        clock = self.worker.world.clock
        assert isinstance(clock, ManualClock)
        async with asyncio.timeout(30):
            while not (steps and steps[-1].finish):
                await clock.advance(0.1)
                await asyncio.sleep(0.002)
        return steps[-1]


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gate]:
    """One whose worker loads on demand; at the end no adapter is in use."""
    worker = await Worker(memory_world(ManualClock()), tmp_path, on_demand=True).start()
    made = Gate(worker)
    yield made
    await asyncio.gather(*made.tasks)
    assert [held.users for held in worker.adapters.slots.loaded.values()] == [0] * len(worker.engine.loaded)


async def test_requests_without_adapter_pass(gate: Gate) -> None:
    """Also before the adapters are there."""
    gate.gate.manager = None
    assert (await gate.ended(gate.submit("r-1"))).finish == "length"
    with pytest.raises(RequestRejected, match="'lora'"):
        gate.submit("r-2", "a@0")


async def test_a_request_for_a_held_adapter_is_counted_until_it_ends(gate: Gate) -> None:
    """However it ends."""
    await gate.worker.load("a")
    identity = gate.worker.identity("a")
    first, second = gate.submit("r-1", identity), gate.submit("r-2", identity)
    assert gate.users("a") == 2
    gate.gate.abort("r-2")
    assert (await gate.ended(second)).finish == "abort"
    assert (await gate.ended(first)).finish == "length"
    assert gate.users("a") == 0
    with pytest.raises(RequestRejected, match="empty"):
        gate.submit("r-3", identity, tokens=0)
    assert gate.users("a") == 0


async def test_a_request_waits_for_its_adapter(gate: Gate) -> None:
    """It is taken at once, and the engine gets it when the adapter is there. Several wait for one load."""
    [identity] = await publish(gate.worker, "a")
    waiting = [gate.submit(f"r-{number}", identity) for number in range(3)]
    assert gate.worker.engine.seen == []
    for steps in waiting:
        assert (await gate.ended(steps)).finish == "length"
    assert gate.worker.engine.seen == [identity] * 3
    assert (await gate.worker.adapters.list())[0]["on_demand"] is True


async def test_what_can_not_be_loaded_ends_with_the_reason(gate: Gate) -> None:
    """Its edge tries another worker then."""
    [identity] = await publish(gate.worker, "a")
    gate.worker.engine.fails = ["load"]
    last = await gate.ended(gate.submit("r-1", identity))
    assert (last.finish, last.detail) == ("error", "the engine can not")
    gate.worker.engine.fails = []
    last = await gate.ended(gate.submit("r-2", "unknown@123"))
    assert (last.finish, last.detail) == ("error", "adapter unknown is no longer served")
    last = await gate.ended(gate.submit("r-3", identity, tokens=0))
    assert (last.finish, last.detail) == ("error", "the prompt is empty")


async def test_a_request_that_is_cancelled_while_it_waits_never_begins(gate: Gate) -> None:
    """The adapter is loaded all the same, and free."""
    [identity] = await publish(gate.worker, "a")
    steps = gate.submit("r-1", identity)
    gate.gate.abort("r-1")
    assert (await gate.ended(steps)).finish == "abort"
    await eventually(lambda: gate.worker.engine.loaded)
    await settle()
    assert gate.worker.engine.seen == []
    assert [step.finish for step in steps] == ["abort"]


async def test_a_worker_that_does_not_load_sends_requests_elsewhere(tmp_path: Path) -> None:
    """So does one that is about to unload: refusals that say that another worker may."""
    worker = await Worker(memory_world(ManualClock()), tmp_path).start()
    gate = Gate(worker)
    await worker.load("a")
    identity = worker.identity("a")
    running = gate.submit("r-1", identity)
    leaving = asyncio.ensure_future(worker.adapters.unload("a"))
    await settle()
    with pytest.raises(RequestRejected, match="is being unloaded here") as caught:
        gate.submit("r-2", identity)
    assert caught.value.retryable
    await gate.ended(running)
    await leaving
    with pytest.raises(RequestRejected, match="without --lora-on-demand") as caught:
        gate.submit("r-3", identity)
    assert caught.value.retryable
