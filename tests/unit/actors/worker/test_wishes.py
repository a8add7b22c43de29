"""What a worker is to hold, and what it holds: a restart at which one fails loses no wish."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.engines.engine import EngineError
from headwater.engines.lora_cache import LoraError
from headwater.events.ports import LogUnavailable
from tests.support.worlds.clock import ManualClock, running
from tests.support.worlds.lora import Worker, eventually
from tests.support.worlds.memory import memory_world

TRIES_S = 600.0
"""A wish is tried again within this time."""

STEP_S = 15.0


async def worker_of(clock: ManualClock, folder: Path, world: Any = None) -> Worker:
    """A life of the one worker, over the same tables and files."""
    return await Worker(world or memory_world(clock), folder).start()


async def passes(clock: ManualClock, holds: Callable[[], Awaitable[bool]]) -> bool:
    """Does it come to hold while time passes? Adapters are read in threads, which take no time of the clock."""
    for _ in range(int(TRIES_S / STEP_S)):
        for _ in range(100):
            if await holds():
                return True
            await asyncio.sleep(0.005)
        await clock.advance(STEP_S)
    return await holds()


class Trouble:
    """Makes adapter a fail to load at one worker, in one of the ways in which it may, until `over`."""

    def __init__(self, how: str, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tries = 0
        self.over = False
        files, source = worker.settings.files, str(worker.sources / "a")
        assert files is not None
        where: Any
        match how:
            case "source":
                where, method, mine = files, "fetch", lambda fetched: fetched == source
                error: Exception = LoraError(502, "the source does not answer")
            case "engine":
                where, method, mine = (
                    worker.engine,
                    "load_lora",
                    lambda adapter: adapter.name.startswith("a@"),
                )
                error = EngineError("no memory is left")
            case _:
                where, method, mine = worker.world.cards, "get", lambda _: True
                error = LogUnavailable("no server answers")
        self._break(monkeypatch, where, method, mine, error)

    def _break(
        self,
        monkeypatch: pytest.MonkeyPatch,
        where: Any,
        method: str,
        mine: Callable[[Any], bool],
        error: Exception,
    ) -> None:
        real = getattr(where, method)

        async def call(about: Any, *rest: Any) -> Any:
            if mine(about) and not self.over:
                self.tries += 1
                raise error
            return await real(about, *rest)

        monkeypatch.setattr(where, method, call)


def wished(worker: Worker) -> set[str]:
    """What the next life of the worker will want."""
    return set(worker.settings.restart_list.read_names())


async def restarted(
    clock: ManualClock, folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Worker, Trouble]:
    """A worker that held a and b, and whose next life cannot load a."""
    first = await worker_of(clock, folder)
    await first.load("a", "b")
    assert wished(first) == {"a", "b"}
    second = await worker_of(clock, folder, first.world)
    return second, Trouble(how, second, monkeypatch)


@pytest.mark.parametrize("how", ["source", "engine", "table"])
async def test_what_failed_at_a_restart_is_tried_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is there: whether its source, the engine or the table of cards was in trouble."""
    clock = ManualClock()
    worker, trouble = await restarted(clock, tmp_path, how, monkeypatch)
    async with running(worker.adapters.run()):
        await eventually(lambda: trouble.tries)
        trouble.over = True

        async def complete() -> bool:
            return sorted(worker.adapters.slots.loaded) == ["a", "b"]

        assert await passes(clock, complete)
        assert await worker.held() == ["a", "b"]


@pytest.mark.parametrize("how", ["source", "engine"])
async def test_a_wish_outlives_lives_in_which_it_failed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That another adapter came does not make the worker forget this one."""
    clock = ManualClock()
    worker, trouble = await restarted(clock, tmp_path, how, monkeypatch)
    async with running(worker.adapters.run()):
        await eventually(lambda: trouble.tries and list(worker.adapters.slots.loaded) == ["b"])
    assert wished(worker) == {"a", "b"}
    third = await worker_of(clock, tmp_path, worker.world)
    trouble.over = True
    async with running(third.adapters.run()):
        await eventually(lambda: sorted(third.adapters.slots.loaded) == ["a", "b"])


async def test_a_wish_that_is_not_fulfilled_is_listed_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it waits for. Routers are told of what is loaded only."""
    worker, trouble = await restarted(ManualClock(), tmp_path, "source", monkeypatch)
    async with running(worker.adapters.run()):
        await eventually(lambda: trouble.tries and list(worker.adapters.slots.loaded) == ["b"])
        listed = {one["name"]: one for one in await worker.adapters.list()}
        assert {name: one["state"] for name, one in listed.items()} == {"a": "wanted", "b": "loaded"}
        assert "the source does not answer" in listed["a"]["reason"]
        assert [identity.rpartition("@")[0] for identity in worker.told[-1]] == ["b"]


@pytest.mark.parametrize("forget", [False, True])
async def test_an_operator_takes_a_wish_back(
    forget: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unloading or forgetting what could not be loaded ends the tries, in this life and the next."""
    clock = ManualClock()
    worker, trouble = await restarted(clock, tmp_path, "source", monkeypatch)
    async with running(worker.adapters.run()):
        await eventually(lambda: trouble.tries and list(worker.adapters.slots.loaded) == ["b"])
        await worker.adapters.unload("a", forget=forget)
        assert wished(worker) == {"b"}
        trouble.over = True
        for _ in range(int(TRIES_S / STEP_S)):
            await clock.advance(STEP_S)
        assert list(worker.adapters.slots.loaded) == ["b"]


async def test_a_wish_ends_with_the_card_of_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten at another worker while this one could not load it."""
    clock = ManualClock()
    worker, trouble = await restarted(clock, tmp_path, "source", monkeypatch)
    async with running(worker.adapters.run()):
        await eventually(lambda: trouble.tries and list(worker.adapters.slots.loaded) == ["b"])
        await worker.adapters.registry.delete_card("a")

        async def ended() -> bool:
            return wished(worker) == {"b"}

        assert await passes(clock, ended)


async def test_the_list_on_disk_is_what_is_wanted(tmp_path: Path) -> None:
    """Adapters that only requests loaded are no wish; those of an operator are until it unloads them."""
    worker = await Worker(memory_world(ManualClock()), tmp_path, on_demand=True).start()
    await worker.load("a", "b")
    identity = worker.identity("b")
    await worker.adapters.unload("b")
    await worker.adapters.acquire(identity)
    assert await worker.held() == ["a", "b"]
    assert wished(worker) == {"a"}
    await worker.adapters.unload("a")
    assert wished(worker) == set()
    assert msgspec.json.decode((tmp_path / "w1.json").read_bytes()) == []
