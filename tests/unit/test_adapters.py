"""A worker's adapters: locks, slots, cards, and that a failure leaves nothing behind."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.actors.adapter_memory import AdapterMemory
from headwater.actors.adapters import Adapters, AdapterSettings
from headwater.actors.world import World
from headwater.engines.adapter_files import AdapterError
from headwater.engines.engine import EngineError, NotSupported
from headwater.engines.sim import SimEngine, SimSettings
from headwater.events.errors import LogUnavailable
from headwater.events.memory import MemoryTable
from headwater.schemas import subjects
from headwater.schemas.card import AdapterCard
from tests.support.adapters import LoraSim, files, make_adapter
from tests.unit.clock import ManualClock, running, settle
from tests.unit.edge_world import memory_world, serve_model

POOL = "m-b16"


class Worker:
    """One worker's adapters over ports that several of them may share."""

    def __init__(self, world: World, folder: Path, name: str = "w1", **settings: Any) -> None:
        self.world = world
        self.sources = folder / "sources"
        self.engine = LoraSim(SimSettings(), world.clock)
        self.told: list[tuple[str, ...]] = []
        memory = AdapterMemory(folder / f"{name}.json")
        usual = AdapterSettings(files(folder / name, self.sources), memory=memory)
        self.settings = usual._replace(**settings)

    async def start(self) -> "Worker":
        """Once the engine is up."""
        info = await self.engine.start()
        self.adapters = Adapters(
            self.world, POOL, self.engine, info, self.settings, ("m", "sim"), self.told.append
        )
        return self

    def source(self, name: str, seed: int = 1, **config: Any) -> str:
        """An adapter that may be loaded; returns where it is."""
        return str(make_adapter(self.sources / name, seed, **config))

    async def load(self, *names: str) -> None:
        """Load adapters of these names, each with its own weights."""
        for name in names:
            await self.adapters.load(name, self.source(name, sum(name.encode())))

    async def held(self) -> list[str]:
        """Names of what is held: by the list, by the engine and by what the fleet was told."""
        names = [one["name"] for one in await self.adapters.list() if one["state"] == "held"]
        assert sorted(one.rpartition("@")[0] for one in self.engine.loaded) == names
        told = self.told[-1] if self.told else ()
        assert [one.rpartition("@")[0] for one in told] == names
        return names

    async def card(self, name: str) -> AdapterCard | None:
        """Its card in the table."""
        entry = await self.world.cards.get(subjects.adapter_key(POOL, name))
        return msgspec.json.decode(entry.value, type=AdapterCard) if entry and entry.value else None

    def identity(self, name: str) -> str:
        """What requests call a held adapter."""
        return self.adapters.slots.held[name].card.identity


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
            "state": "held",
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
    with pytest.raises(AdapterError, match="loaded with other weights") as caught:
        await worker.adapters.load("a", other)
    assert caught.value.status == 409
    await worker.adapters.unload("a")
    with pytest.raises(AdapterError, match="forget the old adapter first"):
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
        with pytest.raises(AdapterError, match="chat is a model") as caught:
            await worker.adapters.load("chat", worker.source("a"))
        assert caught.value.status == 409
    assert await worker.held() == []


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 201, "a\0"])
async def test_a_name_that_can_not_be_one_is_refused(worker: Worker, name: str) -> None:
    """Before anything is fetched."""
    with pytest.raises(AdapterError, match="no usable name"):
        await worker.adapters.load(name, worker.source("a"))


async def test_what_does_not_fit_this_engine_is_refused(worker: Worker) -> None:
    """By rank, by base model and by source; nothing is loaded and no card is written."""
    for source, why, status in (
        (worker.source("a", rank=32), "rank 32, and this engine takes up to 16", 400),
        (worker.source("b", base_model_name_or_path="org/Other"), "trained on org/Other, not on m", 400),
        ("/etc", "--lora-sources", 403),
        (str(worker.sources / "none"), "there is no", 404),
    ):
        with pytest.raises(AdapterError, match=why) as caught:
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
    plain = Adapters(world, POOL, engine, info, AdapterSettings(), ("m",), lambda _: None)
    with pytest.raises(NotSupported, match="'lora'"):
        await plain.load("a", "/a")
    assert not plain.on_demand
    worker = await Worker(world, tmp_path, files=None, on_demand=True).start()
    with pytest.raises(AdapterError, match="--lora-sources says from where"):
        await worker.adapters.load("a", worker.source("a"))
    assert not worker.adapters.on_demand


@pytest.mark.parametrize("method", ["create", "get"])
async def test_what_can_not_be_published_is_taken_out_again(
    worker: Worker, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load leaves nothing: no adapter in the engine, nothing told, no slot taken."""
    with monkeypatch.context() as broken:
        failing(worker.world.cards, method, broken)  # type: ignore[arg-type]
        with pytest.raises(AdapterError, match="no server answers") as caught:
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
    with pytest.raises(AdapterError, match="no slot is free for c: a, b take all 2") as caught:
        await worker.load("c")
    assert caught.value.status == 409
    assert await worker.card("c") is None
    await worker.adapters.unload("a")
    await worker.load("c")
    assert await worker.held() == ["b", "c"]


async def publish(worker: Worker, *names: str) -> list[str]:
    """Make adapters models of the fleet without this worker holding them; returns their identities."""
    found = []
    for name in names:
        await worker.load(name)
        found.append(worker.identity(name))
        await worker.adapters.unload(name)
    return found


async def test_a_request_makes_room_where_it_hurts_least(worker: Worker) -> None:
    """What is in use stays, what an operator loaded goes last, and of the others what was idle longest."""
    clock = worker.world.clock
    assert isinstance(clock, ManualClock)
    identities = dict(zip("abcd", await publish(worker, *"abcd"), strict=True))
    slots = worker.adapters.slots

    async def used(name: str) -> None:
        await worker.adapters.demand(identities[name])
        clock.now_s += 1
        slots.used(identities[name])

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
    assert slots.use(identities["d"])
    await worker.adapters.demand(identities["b"])
    assert await worker.held() == ["b", "d"], "d is in use; so the operator's goes"


async def test_requests_at_the_same_time_wait_for_one_load(worker: Worker) -> None:
    """And each counts as a user. One that comes while it is unloaded loads it anew."""
    [a] = await publish(worker, "a")
    await asyncio.gather(*(worker.adapters.demand(a) for _ in range(3)))
    assert worker.adapters.slots.held["a"].users == 3
    leaving = asyncio.ensure_future(worker.adapters.unload("a"))
    await settle()
    coming = asyncio.ensure_future(worker.adapters.demand(a))
    await settle()
    for _ in range(3):
        worker.adapters.slots.used(a)
    await leaving
    await coming
    assert worker.adapters.slots.held["a"].users == 1


async def test_a_request_waits_for_a_slot_while_all_are_in_use(tmp_path: Path) -> None:
    """Not for ever."""
    worker = await Worker(memory_world(ManualClock()), tmp_path, load_s=0.2).start()
    a, b, c = await publish(worker, *"abc")
    for identity in (a, b):
        await worker.adapters.demand(identity)
    waiting = asyncio.ensure_future(worker.adapters.demand(c))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    worker.adapters.slots.used(b)
    await waiting
    assert await worker.held() == ["a", "c"]
    with pytest.raises(AdapterError, match=r"not loaded within 0\.2 s \(--lora-load-s\)"):
        await worker.adapters.demand(b)
    assert await worker.held() == ["a", "c"]


async def test_a_request_for_what_is_forgotten_gets_nothing(worker: Worker) -> None:
    """Also for one whose weights are others by now; and it brings no card back."""
    [a] = await publish(worker, "a")
    await worker.adapters.unload("a", forget=True)
    with pytest.raises(AdapterError, match="not served any more") as caught:
        await worker.adapters.demand(a)
    assert caught.value.status == 404
    await worker.adapters.load("a", worker.source("other", 99))
    with pytest.raises(AdapterError, match="not served any more"):
        await worker.adapters.demand(a)
    assert await worker.held() == ["a"]


async def test_what_is_forgotten_during_a_load_stays_forgotten(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the card and the end of the load."""
    [a] = await publish(worker, "a")
    plain = worker.engine.load_lora

    async def load(adapter: object) -> None:
        await plain(adapter)  # type: ignore[arg-type]
        await worker.adapters.cards.forget("a")

    monkeypatch.setattr(worker.engine, "load_lora", load)
    with pytest.raises(AdapterError, match="forgotten while it was loaded"):
        await worker.adapters.demand(a)
    assert await worker.card("a") is None
    assert worker.engine.loaded == {}


async def test_unloading_waits_for_requests_and_takes_no_new_ones(worker: Worker) -> None:
    """The fleet is told first. Again is fine, an unknown name is not."""
    await worker.load("a", "b")
    slots, identity = worker.adapters.slots, worker.identity("a")
    assert slots.use(identity)
    leaving = asyncio.ensure_future(worker.adapters.unload("a"))
    await settle()
    assert [one.rpartition("@")[0] for one in worker.told[-1]] == ["b"]
    assert slots.leaving(identity)
    assert not slots.use(identity)
    assert not leaving.done()
    slots.used(identity)
    await leaving
    assert await worker.held() == ["b"]
    assert await worker.card("a") is not None, "others may serve it"
    await worker.adapters.unload("a")
    with pytest.raises(AdapterError, match="there is no adapter c") as caught:
        await worker.adapters.unload("c")
    assert caught.value.status == 404


async def test_an_adapter_that_stays_in_use_stays_loaded(tmp_path: Path) -> None:
    """And is offered again."""
    worker = await Worker(memory_world(ManualClock()), tmp_path, unload_s=0.05).start()
    await worker.load("a")
    assert worker.adapters.slots.use(worker.identity("a"))
    with pytest.raises(AdapterError, match="1 requests still use adapter a") as caught:
        await worker.adapters.unload("a")
    assert caught.value.status == 409
    assert await worker.held() == ["a"]
    assert worker.adapters.slots.use(worker.identity("a"))


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


async def eventually(holds: Callable[[], object]) -> None:
    """Threads take part: turns of the loop alone do not do."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_what_one_worker_forgets_all_unload(tmp_path: Path) -> None:
    """An adapter that is no model any more must not stay in memory somewhere."""
    world = memory_world(ManualClock())
    one = await Worker(world, tmp_path, "w1").start()
    two = await Worker(world, tmp_path, "w2").start()
    async with running(one.adapters.run()), running(two.adapters.run()):
        for worker in (one, two):
            await worker.load("a", "b")
        assert two.adapters.slots.use(two.identity("a"))
        await one.adapters.unload("a", forget=True)
        await settle()
        assert await one.held() == ["b"]
        assert await one.card("a") is None
        assert len(two.engine.loaded) == 2, "a request still uses it there"
        two.adapters.slots.used(two.identity("a"))
        await eventually(lambda: len(two.engine.loaded) == 1)
        assert await two.held() == ["b"]


async def test_a_worker_that_starts_again_loads_what_it_held(tmp_path: Path) -> None:
    """As far as it still is a model; a broken memory costs nothing but itself."""
    world = memory_world(ManualClock())
    before = await Worker(world, tmp_path).start()
    await before.load("a", "b")
    await before.adapters.cards.forget("b")
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
