"""The common part of engines of Python libraries with data-parallel ranks: vLLM and SGLang.

Each rank publishes its KV events on a socket of its own. The libraries' calls clear all ranks or none, and load adapters for all.

Each rank has its own requests, cache, events and load, so the router treats each as a worker; the engine around them
starts and stops once. Operations on the engine as a whole (sleep, pause, LoRA) run once every rank has requested them,
and are undone as soon as one rank requests that: a rank that requested one and waits for the others receives no requests.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from headwater.engines.engine import (
    DEFAULT_FIELDS,
    Aborts,
    Emit,
    Engine,
    EngineBase,
    EngineDied,
    EngineInfo,
    EngineLoad,
    KvEvent,
    LoraAdapter,
    NotSupported,
    PauseMode,
    Step,
    Transfer,
    check_sleep,
)
from headwater.engines.kv_events import KvTranslator
from headwater.engines.kv_socket import KvSocket, reachable
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import (
    Choreography,
    GenerateRequest,
)
from headwater.schemas.tables import Capability


class EngineRank(ABC):
    """One data-parallel rank: its KV events, its cached blocks, its requests (`running`), and its load."""

    def __init__(
        self, number: int, endpoints: tuple[str, str], translator: KvTranslator, total_blocks: int
    ) -> None:
        """`endpoints` are those of its events and of their replay."""
        self.number = number
        self.translator = translator
        events, replay = map(reachable, endpoints)
        self.socket = KvSocket(events, replay, translator)
        self.idle = EngineLoad(0, 0, 0, total_blocks)
        self.running: set[str] = set()

    def load(self) -> EngineLoad:
        """Present load. Without running requests it is zero: an idle engine does not report."""
        return self.busy_load() if self.running else self.idle

    @abstractmethod
    def busy_load(self) -> EngineLoad:
        """The load as the engine reports it, while requests run."""


class AdapterTable(Protocol):
    """The adapters of an engine."""

    async def load(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`."""
        ...

    async def unload(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        ...


AnyRank = TypeVar("AnyRank", bound=EngineRank)
AnyLoras = TypeVar("AnyLoras", bound=AdapterTable)


class RankedEngineBase(EngineBase, Generic[AnyRank, AnyLoras]):
    """Base of such an engine. `_tasks` are those of its requests by id, `_asleep` the level of its sleep, 0 if it is awake."""

    def __init__(self, loras: AnyLoras) -> None:
        self._loras = loras
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._ranks: Sequence[AnyRank] = ()
        self._asleep = 0
        self._clear_lock = asyncio.Lock()

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`."""
        self._require("lora")
        await self._loras.load(adapter)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._require("lora")
        await self._loras.unload(name)

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        task = self._tasks.get(request)
        if task is not None:
            # Cancelling the consumer makes the engine abort; the final step is emitted when the task ends.
            task.cancel()

    async def kv_events(self, *, rank: int = 0) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        if not self._ranks:
            raise EngineDied(f"{self.name} is not started")
        async for events in self._ranks[rank].socket.events():
            yield events

    def held_blocks(self, *, rank: int = 0) -> list[BlocksStored]:
        """See `Engine.held_blocks`. After permanently lost events: the blocks announced since."""
        self._ranks[rank].socket.discard_pending()
        return self._ranks[rank].translator.held()

    def load(self, *, rank: int = 0) -> EngineLoad:
        """See `Engine.load`."""
        return self._ranks[rank].load()

    def _check_sleep(self, level: int) -> None:
        """Raises `EngineError` unless it may sleep now."""
        self._require("sleep")
        check_sleep(level, asleep=bool(self._asleep), busy=len(self._tasks))

    @asynccontextmanager
    async def _clearing(self) -> AsyncIterator[None]:
        """Around a call that empties the engine's cache: the event is published when the call returns, not later."""
        async with self._clear_lock:
            for rank in self._ranks:
                rank.socket.expect_clear()
            yield
            for rank in self._ranks:
                rank.socket.confirm_clear()

    async def _cancel_requests(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def default_sampling(defaults: Mapping[str, Any]) -> dict[str, float]:
    """A model's own defaults, as its engine reads them from its files, for fields that a request may omit."""
    return {name: defaults[name] for name in DEFAULT_FIELDS if defaults.get(name) is not None}


# Ranks of one engine as engines of their own.


class RankedEngine(Engine, Protocol):
    """An engine with `ranks` data-parallel ranks, whose methods take a rank. `ranks` is set before `start`."""

    ranks: int

    def submit(
        self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None, *, rank: int = 0
    ) -> None:
        """See `Engine.submit`."""
        ...

    def kv_events(self, *, rank: int = 0) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`. One reader per rank."""
        ...

    def held_blocks(self, *, rank: int = 0) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        ...

    def load(self, *, rank: int = 0) -> EngineLoad:
        """See `Engine.load`."""
        ...


def split(engine: RankedEngine) -> list[Engine]:
    """One engine per rank. All of them belong to the event loop that starts the first."""
    shared = _Shared(engine)
    return [RankEngine(shared, number) for number in range(engine.ranks)]


class _Shared:
    """The shared engine, and which ranks requested which operation."""

    def __init__(self, engine: RankedEngine) -> None:
        self.engine = engine
        self.lock = asyncio.Lock()
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._up: set[int] = set()
        self._requested: dict[str, set[int]] = {}

    async def start(self, number: int) -> EngineInfo:
        """Start it, unless another rank did. An error is raised for every rank."""
        self._up.add(number)
        if self._starting is None:
            self._starting = asyncio.create_task(self.engine.start(), name="engine start")
        return await asyncio.shield(self._starting)

    async def stop(self, number: int) -> None:
        """Stop it when the last running rank stops."""
        if number in self._up:
            self._up.discard(number)
            if not self._up:
                await self.engine.stop()

    def request(self, operation: str, number: int) -> bool:
        """Record that this rank requests `operation`; did it complete the set of all ranks?"""
        requested = self._requested.setdefault(operation, set())
        first = number not in requested
        requested.add(number)
        return first and len(requested) == self.engine.ranks

    def withdraw(self, operation: str, number: int) -> tuple[bool, bool]:
        """Record that this rank undoes `operation`: (had all ranks requested it?, does none any more?)."""
        requested = self._requested.setdefault(operation, set())
        all_were = len(requested) == self.engine.ranks
        requested.discard(number)
        return all_were, not requested


class RankEngine:
    """See `headwater.engines.engine.Engine`: one rank of it."""

    def __init__(self, shared: _Shared, number: int) -> None:
        self._shared = shared
        self._engine = engine = shared.engine
        self._number = number
        self._mine: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.name = engine.name
        self.choreography: Choreography = engine.choreography
        self.aborts: Aborts = engine.aborts
        self.notices_fetches = engine.notices_fetches
        self.capabilities: frozenset[Capability] = engine.capabilities
        # Calls for which it does not matter which rank they come from.
        self.release, self.embed = engine.release, engine.embed
        self.encode, self.holds_embedding = engine.encode, engine.holds_embedding
        self.put_embedding = engine.put_embedding
        self.generate_images, self.generate_video = engine.generate_images, engine.generate_video
        # Those that concern all ranks: a clear is reported by the events of each, a death is that of each.
        self.profile, self.clear_kv, self.check = engine.profile, engine.clear_kv, engine.check

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        info = await self._shared.start(self._number)
        self.capabilities = self._engine.capabilities
        return info

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""

        def passed_on(step: Step) -> None:
            if step.finish:
                self._mine.discard(request.request)
                if not self._mine:
                    self._idle.set()
            emit(step)

        self._engine.submit(request, passed_on, transfer, rank=self._number)
        self._mine.add(request.request)
        self._idle.clear()

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        if request in self._mine:
            self._engine.abort(request)

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `Engine.kv_events`."""
        return self._engine.kv_events(rank=self._number)

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return self._engine.held_blocks(rank=self._number)

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return self._engine.load(rank=self._number)

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`. On all ranks."""
        async with self._shared.lock:
            await self._engine.load_lora(adapter)
            self._shared.request(f"lora {adapter.name}", self._number)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`. Unloaded once no rank requires it."""
        async with self._shared.lock:
            _, unused = self._shared.withdraw(f"lora {name}", self._number)
            if unused:
                await self._engine.unload_lora(name)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. When the last rank requests it."""
        self._needs("sleep")
        async with self._shared.lock:
            if self._shared.request("sleep", self._number):
                try:
                    await self._engine.sleep(level)
                except BaseException:
                    self._shared.withdraw("sleep", self._number)
                    raise

    async def wake(self) -> None:
        """See `Engine.wake`. When the first rank requests it."""
        self._needs("sleep")
        async with self._shared.lock:
            asleep, _ = self._shared.withdraw("sleep", self._number)
            if asleep:
                await self._engine.wake()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. When the last rank requests it; until then only this rank's requests end by `mode`."""
        self._needs("pause")
        async with self._shared.lock:
            if self._shared.request("pause", self._number):
                await self._engine.pause(mode)
                return
        if mode == "abort":
            self._abort_mine()
        if mode != "keep":
            await self._idle.wait()

    async def resume(self) -> None:
        """See `Engine.resume`. When the first rank requests it."""
        self._needs("pause")
        async with self._shared.lock:
            paused, _ = self._shared.withdraw("pause", self._number)
            if paused:
                await self._engine.resume()

    async def stop(self) -> None:
        """See `Engine.stop`. Ends this rank's requests; the engine stops with the last rank."""
        self._abort_mine()
        await self._idle.wait()
        await self._shared.stop(self._number)

    def _abort_mine(self) -> None:
        for request in list(self._mine):
            self._engine.abort(request)

    def _needs(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            raise NotSupported(self.name, capability)
