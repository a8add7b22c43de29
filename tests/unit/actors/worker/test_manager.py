"""LoraManager that an operator loads: cards, names, slots, and that a failure leaves nothing behind."""

import asyncio
from pathlib import Path

import pytest

from headwater.actors.worker.inflight import WorkerStatus
from headwater.actors.worker.lora import LoraManager, LoraSettings
from headwater.actors.worker.settings import WorkerProfile
from headwater.engines.engine import EngineError, NotSupported
from headwater.engines.lora_cache import LoraError
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.events.memory import MemoryTable
from headwater.events.ports import LogUnavailable
from tests.support.worlds.clock import ManualClock, running, settle
from tests.support.worlds.edge import serve_model
from tests.support.worlds.lora import POOL, Worker
from tests.support.worlds.memory import memory_world


@pytest.fixture
async def worker(tmp_path: Path) -> Worker:
    """A worker with two slots that holds nothing."""
    return await Worker(memory_world(ManualClock()), tmp_path).start()


def failing(table: MemoryTable, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a call of the card table fail as it does without a server."""

    async def fail(*_: object, **__: object) -> None:
        raise LogUnavailable("no server answers")

    monkeypatch.setattr(table, method, fail)


async def test_a_loaded_adapter_is_told_and_published(worker: Worker) -> None:
    """The engine has it under name and weights, the fleet knows who holds it, and its card says where it is."""
    source = worker.source("a", rank=8)
    await worker.adapters.load("org/my adapter", source)
    card = await worker.card("org/my adapter")
    assert card is not None
    assert (card.source, card.rank, card.pool) == (source, 8, POOL)
    identity = f"org/my adapter@{card.digest[:12]}"
    assert worker.told == [(identity,)]
    assert list(worker.engine.loaded) == [identity]
    assert await worker.adapters.list() == [
        {
            "name": "org/my adapter",
            "source": source,
            "digest": card.digest,
            "rank": 8,
            "requests": 0,
            "state": "loaded",
            "on_demand": False,
        }
    ]


async def test_loading_it_again_changes_nothing(worker: Worker) -> None:
    """Also at the same time: one of them loads, the others find it loaded."""
    source = worker.source("a")
    await asyncio.gather(*(worker.adapters.load("a", source) for _ in range(3)))
    first = await worker.card("a")
    await worker.adapters.load("a", source)
    assert await worker.held() == ["a"]
    assert len(worker.told) == 1
    assert await worker.card("a") == first


async def test_other_weights_under_a_name_in_use_are_refused(worker: Worker) -> None:
    """Here, and in the whole pool: one name is one adapter."""
    await worker.load("a")
    before = await worker.card("a")
    other = worker.source("other", 99)
    with pytest.raises(LoraError, match="loaded with other weights") as caught:
        await worker.adapters.load("a", other)
    assert caught.value.status == 409
    await worker.adapters.unload("a")
    with pytest.raises(LoraError, match="forget the old adapter first"):
        await worker.adapters.load("a", other)
    assert await worker.card("a") == before
    await worker.adapters.unload("a", forget=True)
    await worker.adapters.load("a", other)
    after = await worker.card("a")
    assert before is not None
    assert after is not None
    assert after.identity != before.identity, "no block of the old weights is taken for one of the new"


async def test_a_name_of_a_model_is_refused(worker: Worker) -> None:
    """A request must mean one thing."""
    await serve_model(worker.world, "chat")
    async with running(worker.adapters.run()):
        await settle()
        with pytest.raises(LoraError, match="chat is a model") as caught:
            await worker.adapters.load("chat", worker.source("a"))
        assert caught.value.status == 409
    assert await worker.held() == []


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 201, "a\0"])
async def test_a_name_that_can_not_be_one_is_refused(worker: Worker, name: str) -> None:
    """Before anything is fetched."""
    with pytest.raises(LoraError, match="not a usable name"):
        await worker.adapters.load(name, worker.source("a"))


async def test_what_does_not_fit_this_engine_is_refused(worker: Worker) -> None:
    """By rank, by base model and by source; nothing is loaded and no card is written."""
    for source, why, status in (
        (worker.source("a", rank=32), "rank 32, and this engine takes up to 16", 400),
        (worker.source("b", base_model_name_or_path="org/Other"), "trained on org/Other, not on m", 400),
        ("/etc", "--lora-sources", 403),
        (str(worker.sources / "none"), "there is no", 404),
    ):
        with pytest.raises(LoraError, match=why) as caught:
            await worker.adapters.load("x", source)
        assert caught.value.status == status
    assert await worker.held() == []
    assert await worker.card("x") is None
    await worker.adapters.load("x", worker.source("c", base_model_name_or_path="org/SIM"))


async def test_a_worker_without_slots_or_sources_says_so(tmp_path: Path) -> None:
    """Not with a traceback."""
    world = memory_world(ManualClock())
    engine = SimEngine(SimSettings(), world.clock)
    engine.capabilities = engine.capabilities - {"lora"}
    info = await engine.start()
    status = WorkerStatus("w", WorkerProfile(), asyncio.Event())
    plain = LoraManager(world, POOL, engine, info, LoraSettings(), ("m",), status)
    with pytest.raises(NotSupported, match="'lora'"):
        await plain.load("a", "/a")
    assert not plain.on_demand
    worker = await Worker(world, tmp_path, files=None, on_demand=True).start()
    with pytest.raises(LoraError, match="--lora-sources names the allowed sources"):
        await worker.adapters.load("a", worker.source("a"))
    assert not worker.adapters.on_demand


@pytest.mark.parametrize("method", ["create", "get"])
async def test_what_can_not_be_published_is_taken_out_again(
    worker: Worker, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load leaves nothing: no adapter in the engine, nothing told, no slot taken."""
    with monkeypatch.context() as broken:
        failing(worker.world.cards, method, broken)  # type: ignore[arg-type]
        with pytest.raises(LoraError, match="no server answers") as caught:
            await worker.load("a")
        assert caught.value.status == 502
    assert worker.engine.loaded == {}
    assert worker.told == []
    await worker.load("a", "b")
    assert await worker.held() == ["a", "b"]


async def test_what_the_engine_refuses_is_not_published(worker: Worker) -> None:
    """And its slot is free again."""
    worker.engine.fails = ["load"]
    with pytest.raises(EngineError, match="the engine can not"):
        await worker.load("a")
    assert await worker.card("a") is None
    worker.engine.fails = []
    await worker.load("a", "b")


async def test_a_load_that_is_given_up_leaves_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked may be gone in the middle of it."""
    stuck = asyncio.Event()

    async def wait(*_: object, **__: object) -> int:
        stuck.set()
        await asyncio.Event().wait()
        return 1

    with monkeypatch.context() as slow:
        slow.setattr(worker.world.cards, "create", wait)
        loading = asyncio.ensure_future(worker.load("a"))
        await stuck.wait()
        assert worker.engine.loaded
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    assert worker.engine.loaded == {}
    assert await worker.held() == []
    await worker.load("a", "b")


async def test_an_operator_never_pushes_another_adapter_out(worker: Worker) -> None:
    """Full is full: it says what takes the slots."""
    await worker.load("a", "b")
    with pytest.raises(LoraError, match="no slot is free for c: a, b take all 2") as caught:
        await worker.load("c")
    assert caught.value.status == 409
    assert await worker.card("c") is None
    await worker.adapters.unload("a")
    await worker.load("c")
    assert await worker.held() == ["b", "c"]
