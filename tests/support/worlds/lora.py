"""A worker's adapters over ports in memory, for the tests of them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.inflight import WorkerStatus
from headwater.actors.worker.lora import LoraManager, LoraSettings
from headwater.actors.worker.lora_slots import RestartList
from headwater.actors.worker.settings import LoraLoading, WorkerProfile
from headwater.engines.sim.engine import SimSettings
from headwater.schemas import subjects
from headwater.schemas.tables import LoraCard
from tests.support.engines.adapters import LoraSim, files, make_adapter

POOL = "m-b16"


class Worker:
    """One worker's adapters over ports that several of them may share."""

    def __init__(self, world: Ports, folder: Path, name: str = "w1", **settings: Any) -> None:
        self.world = world
        self.sources = folder / "sources"
        self.engine = LoraSim(SimSettings(), world.clock)
        self.told: list[tuple[str, ...]] = []
        """What the fleet was told of loaded adapters, each time."""
        self.status = WorkerStatus(name, WorkerProfile(), asyncio.Event())
        self.status.publish = self.publish_status
        memory = RestartList(folder / f"{name}.json")
        usual = LoraSettings(files(folder / name, self.sources), restart_list=memory)
        loading = {name: settings.pop(name) for name in LoraLoading._fields if name in settings}
        self.settings = usual._replace(loading=LoraLoading(**loading), **settings)

    async def start(self) -> "Worker":
        """Once the engine is up."""
        info = await self.engine.start()
        self.adapters = LoraManager(
            self.world, POOL, self.engine, info, self.settings, ("m", "sim"), self.status
        )
        return self

    def publish_status(self) -> None:
        """Called when the status changes."""
        self.told.append(self.status.loras)

    def source(self, name: str, seed: int = 1, **config: Any) -> str:
        """An adapter that may be loaded; returns where it is."""
        return str(make_adapter(self.sources / name, seed, **config))

    async def load(self, *names: str) -> None:
        """Load adapters of these names, each with its own weights."""
        for name in names:
            await self.adapters.load(name, self.source(name, sum(name.encode())))

    async def held(self) -> list[str]:
        """Names of what is held: by the list, by the engine and by what the fleet was told."""
        names = [one["name"] for one in await self.adapters.list() if one["state"] == "loaded"]
        assert sorted(one.rpartition("@")[0] for one in self.engine.loaded) == names
        told = self.told[-1] if self.told else ()
        assert [one.rpartition("@")[0] for one in told] == names
        return names

    async def card(self, name: str) -> LoraCard | None:
        """Its card in the table."""
        entry = await self.world.cards.get(subjects.lora_key(POOL, name))
        return msgspec.json.decode(entry.value, type=LoraCard) if entry and entry.value else None

    def identity(self, name: str) -> str:
        """What requests call a held adapter."""
        return self.adapters.slots.loaded[name].card.identity


async def publish(worker: Worker, *names: str) -> list[str]:
    """Make adapters models of the fleet without this worker holding them; returns their identities."""
    found = []
    for name in names:
        await worker.load(name)
        found.append(worker.identity(name))
        await worker.adapters.unload(name)
    return found


async def eventually(holds: Callable[[], object]) -> None:
    """Threads take part: turns of the loop alone do not do."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)
