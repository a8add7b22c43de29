"""Adapters that go: not under a request, from every worker if forgotten; and back with a worker that starts again."""

import asyncio
from pathlib import Path

import pytest

from headwater.engines.engine import EngineError
from headwater.engines.lora_cache import LoraError
from headwater.events.memory import MemoryTable
from tests.support.worlds.clock import ManualClock, running, settle
from tests.support.worlds.lora import Worker, eventually
from tests.support.worlds.memory import memory_world


@pytest.fixture
async def worker(tmp_path: Path) -> Worker:
    """A worker with two slots that holds nothing."""
    return await Worker(memory_world(ManualClock()), tmp_path).start()


async def test_unloading_waits_for_requests_and_takes_no_new_ones(worker: Worker) -> None:
    """The fleet is told first. Again is fine, an unknown name is not."""
    await worker.load("a", "b")
    slots, identity = worker.adapters.slots, worker.identity("a")
    assert slots.acquire(identity)
    leaving = asyncio.ensure_future(worker.adapters.unload("a"))
    await settle()
    assert [one.rpartition("@")[0] for one in worker.told[-1]] == ["b"]
    assert slots.is_unloading(identity)
    assert not slots.acquire(identity)
    assert not leaving.done()
    slots.release(identity)
    await leaving
    assert await worker.held() == ["b"]
    assert await worker.card("a") is not None, "others may serve it"
    await worker.adapters.unload("a")
    with pytest.raises(LoraError, match="there is no adapter c") as caught:
        await worker.adapters.unload("c")
    assert caught.value.status == 404


async def test_an_adapter_that_stays_in_use_stays_loaded(tmp_path: Path) -> None:
    """And is offered again."""
    worker = await Worker(memory_world(ManualClock()), tmp_path, unload_s=0.05).start()
    await worker.load("a")
    assert worker.adapters.slots.acquire(worker.identity("a"))
    with pytest.raises(LoraError, match="1 requests still use adapter a") as caught:
        await worker.adapters.unload("a")
    assert caught.value.status == 409
    assert await worker.held() == ["a"]
    assert worker.adapters.slots.acquire(worker.identity("a"))


async def test_what_the_engine_does_not_let_go_is_still_served(worker: Worker) -> None:
    """The error is the engine's own."""
    await worker.load("a")
    worker.engine.fails = ["unload"]
    with pytest.raises(EngineError, match="the engine can not"):
        await worker.adapters.unload("a")
    assert await worker.held() == ["a"]
    worker.engine.fails = []
    await worker.adapters.unload("a")
    assert await worker.held() == []


async def test_what_one_worker_forgets_all_unload(tmp_path: Path) -> None:
    """An adapter that is no model any more must not stay in memory somewhere."""
    world = memory_world(ManualClock())
    one = await Worker(world, tmp_path, "w1").start()
    two = await Worker(world, tmp_path, "w2").start()
    async with running(one.adapters.run()), running(two.adapters.run()):
        for worker in (one, two):
            await worker.load("a", "b")
        assert two.adapters.slots.acquire(two.identity("a"))
        await one.adapters.unload("a", forget=True)
        await settle()
        assert await one.held() == ["b"]
        assert await one.card("a") is None
        assert len(two.engine.loaded) == 2, "a request still uses it there"
        two.adapters.slots.release(two.identity("a"))
        await eventually(lambda: len(two.engine.loaded) == 1)
        assert await two.held() == ["b"]


async def test_a_worker_that_starts_again_loads_what_it_held(tmp_path: Path) -> None:
    """As far as it still is a model; a broken memory costs nothing but itself."""
    world = memory_world(ManualClock())
    before = await Worker(world, tmp_path).start()
    await before.load("a", "b")
    await before.adapters.registry.delete_card("b")
    after = await Worker(world, tmp_path).start()
    async with running(after.adapters.run()):
        await eventually(lambda: after.engine.loaded)
        await settle()
        assert await after.held() == ["a"]
        assert (await after.adapters.list())[0]["on_demand"] is False
    (tmp_path / "w1.json").write_bytes(b"not JSON")
    again = await Worker(world, tmp_path).start()
    async with running(again.adapters.run()):
        await settle()
        assert await again.held() == []


async def test_an_adapter_whose_card_was_lost_stays_loaded_and_is_published_again(tmp_path: Path) -> None:
    """The table of cards was deleted as a whole: nobody forgot the adapter. One that somebody forgets is still unloaded."""
    clock = ManualClock()
    world = memory_world(clock)
    table = world.cards
    assert isinstance(table, MemoryTable)
    one = await Worker(world, tmp_path, "w1").start()
    two = await Worker(world, tmp_path, "w2").start()
    async with running(one.adapters.run()), running(two.adapters.run()):
        for worker in (one, two):
            await worker.load("a", "b")
        cards = [await one.card(name) for name in ("a", "b")]
        table.replace()
        await clock.advance(10.0)
        assert [await one.card(name) for name in ("a", "b")] == cards
        for worker in (one, two):
            assert await worker.held() == ["a", "b"]
        await one.adapters.unload("a", forget=True)
        await clock.advance(10.0)
        assert await one.card("a") is None
        assert await two.held() == ["b"]
