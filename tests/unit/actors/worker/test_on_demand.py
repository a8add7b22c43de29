"""Adapters that requests load: they wait for one load and for a slot, and get nothing that is forgotten."""

import asyncio
from pathlib import Path

import pytest

from headwater.engines.lora_cache import LoraError
from tests.support.worlds.clock import ManualClock, settle
from tests.support.worlds.lora import Worker, publish
from tests.support.worlds.memory import memory_world


@pytest.fixture
async def worker(tmp_path: Path) -> Worker:
    """A worker with two slots that holds nothing."""
    return await Worker(memory_world(ManualClock()), tmp_path).start()


async def test_a_request_makes_room_where_it_hurts_least(worker: Worker) -> None:
    """What is in use stays, what an operator loaded goes last, and of the others what was idle longest."""
    clock = worker.world.clock
    assert isinstance(clock, ManualClock)
    identities = dict(zip("abcd", await publish(worker, *"abcd"), strict=True))
    slots = worker.adapters.slots

    async def used(name: str) -> None:
        await worker.adapters.acquire(identities[name])
        clock.now_s += 1
        slots.release(identities[name])

    for name in "ab":
        await used(name)
    await used("a")
    await used("c")
    assert await worker.held() == ["a", "c"], "b was idle longest"
    await worker.adapters.unload("a")
    await worker.load("a")
    await used("c")
    await used("d")
    assert await worker.held() == ["a", "d"], "nobody asked for c; a was idle longer"
    assert slots.acquire(identities["d"])
    await worker.adapters.acquire(identities["b"])
    assert await worker.held() == ["b", "d"], "d is in use; so the operator's goes"


async def test_requests_at_the_same_time_wait_for_one_load(worker: Worker) -> None:
    """And each counts as a user. One that comes while it is unloaded loads it anew."""
    [a] = await publish(worker, "a")
    await asyncio.gather(*(worker.adapters.acquire(a) for _ in range(3)))
    assert worker.adapters.slots.loaded["a"].users == 3
    leaving = asyncio.ensure_future(worker.adapters.unload("a"))
    await settle()
    coming = asyncio.ensure_future(worker.adapters.acquire(a))
    await settle()
    for _ in range(3):
        worker.adapters.slots.release(a)
    await leaving
    await coming
    assert worker.adapters.slots.loaded["a"].users == 1


async def test_a_request_waits_for_a_slot_while_all_are_in_use(tmp_path: Path) -> None:
    """Not for ever."""
    worker = await Worker(memory_world(ManualClock()), tmp_path, load_s=0.2).start()
    a, b, c = await publish(worker, *"abc")
    for identity in (a, b):
        await worker.adapters.acquire(identity)
    waiting = asyncio.ensure_future(worker.adapters.acquire(c))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    worker.adapters.slots.release(b)
    await waiting
    assert await worker.held() == ["a", "c"]
    with pytest.raises(LoraError, match=r"not loaded within 0\.2 s"):
        await worker.adapters.acquire(b)
    assert await worker.held() == ["a", "c"]


async def test_a_request_for_what_is_forgotten_gets_nothing(worker: Worker) -> None:
    """Also for one whose weights are others by now; and it brings no card back."""
    [a] = await publish(worker, "a")
    await worker.adapters.unload("a", forget=True)
    with pytest.raises(LoraError, match="no longer served") as caught:
        await worker.adapters.acquire(a)
    assert caught.value.status == 404
    await worker.adapters.load("a", worker.source("other", 99))
    with pytest.raises(LoraError, match="no longer served"):
        await worker.adapters.acquire(a)
    assert await worker.held() == ["a"]


async def test_what_is_forgotten_during_a_load_stays_forgotten(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the card and the end of the load."""
    [a] = await publish(worker, "a")
    plain = worker.engine.load_lora

    async def load(adapter: object) -> None:
        await plain(adapter)  # type: ignore[arg-type]
        await worker.adapters.registry.delete_card("a")

    monkeypatch.setattr(worker.engine, "load_lora", load)
    with pytest.raises(LoraError, match="forgotten while it was loaded"):
        await worker.adapters.acquire(a)
    assert await worker.card("a") is None
    assert worker.engine.loaded == {}
