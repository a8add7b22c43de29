"""Data-parallel ranks of one engine as engines of their own.

Each rank has its own requests, cache, events and load, so each is a worker of its own for the router; the engine
around them starts and stops once. What an engine can only do as a whole (sleep, pause, adapters) it does once every
rank was told to, and undoes as soon as one is: a rank that was told and waits for the others is given nothing
meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from headwater.engines.engine import (
    Adapter,
    Capability,
    Emit,
    Engine,
    EngineInfo,
    EngineLoad,
    KvEvent,
    NotSupported,
    PauseMode,
    Step,
    Transfer,
)
from headwater.schemas.handoff import Choreography
from headwater.schemas.inference import EmbedRequest, GenerateRequest
from headwater.schemas.kv import BlocksStored


class RankedEngine(Engine, Protocol):
    """An engine with `ranks` data-parallel ranks, whose methods take one. It is known before `start`."""

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
    """One engine per rank. All of them live on the event loop that starts the first."""
    shared = _Shared(engine)
    return [Rank(shared, number) for number in range(engine.ranks)]


class _Shared:
    """The engine behind its ranks, and which of them want what."""

    def __init__(self, engine: RankedEngine) -> None:
        self.engine = engine
        self.lock = asyncio.Lock()
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._up: set[int] = set()
        self._told: dict[str, set[int]] = {}

    async def start(self, number: int) -> EngineInfo:
        """Start it, unless another rank did. Raises for every rank what that raised."""
        self._up.add(number)
        if self._starting is None:
            self._starting = asyncio.create_task(self.engine.start(), name="engine start")
        return await asyncio.shield(self._starting)

    async def stop(self, number: int) -> None:
        """Stop it with the last of the ranks that are up."""
        if number in self._up:
            self._up.discard(number)
            if not self._up:
                await self.engine.stop()

    def tell(self, what: str, number: int) -> bool:
        """Note that this rank was told; was it the last of all?"""
        told = self._told.setdefault(what, set())
        first = number not in told
        told.add(number)
        return first and len(told) == self.engine.ranks

    def untell(self, what: str, number: int) -> tuple[bool, bool]:
        """Note that this rank was told to undo it: had all been told, and is now none?"""
        told = self._told.setdefault(what, set())
        all_were = len(told) == self.engine.ranks
        told.discard(number)
        return all_were, not told


class Rank:
    """See `headwater.engines.engine.Engine`: one rank of it."""

    def __init__(self, shared: _Shared, number: int) -> None:
        self._shared = shared
        self._engine = shared.engine
        self._number = number
        self._mine: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.name = shared.engine.name
        self.choreography: Choreography = shared.engine.choreography
        self.capabilities: frozenset[Capability] = shared.engine.capabilities

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

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        await self._engine.release(request, params)

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`. On whichever rank the engine chooses."""
        return await self._engine.embed(request)

    async def load_lora(self, adapter: Adapter) -> None:
        """See `Engine.load_lora`. On all ranks."""
        async with self._shared.lock:
            await self._engine.load_lora(adapter)
            self._shared.tell(f"lora {adapter.name}", self._number)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`. Gone once no rank wants it."""
        async with self._shared.lock:
            _, nobody = self._shared.untell(f"lora {name}", self._number)
            if nobody:
                await self._engine.unload_lora(name)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. With the last rank that is told."""
        self._needs("sleep")
        async with self._shared.lock:
            if self._shared.tell("sleep", self._number):
                try:
                    await self._engine.sleep(level)
                except BaseException:
                    self._shared.untell("sleep", self._number)
                    raise

    async def wake(self) -> None:
        """See `Engine.wake`. With the first."""
        self._needs("sleep")
        async with self._shared.lock:
            asleep, _ = self._shared.untell("sleep", self._number)
            if asleep:
                await self._engine.wake()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. With the last rank that is told; until then this one's own requests end by `mode`."""
        self._needs("pause")
        async with self._shared.lock:
            if self._shared.tell("pause", self._number):
                await self._engine.pause(mode)
                return
        if mode == "abort":
            self._abort_mine()
        if mode != "keep":
            await self._idle.wait()

    async def resume(self) -> None:
        """See `Engine.resume`. With the first."""
        self._needs("pause")
        async with self._shared.lock:
            paused, _ = self._shared.untell("pause", self._number)
            if paused:
                await self._engine.resume()

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`. Of all ranks."""
        await self._engine.profile(on=on)

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. Of all ranks: each tells it by its own events."""
        await self._engine.clear_kv()

    async def check(self) -> None:
        """See `Engine.check`. A dead engine is dead for every rank."""
        await self._engine.check()

    async def stop(self) -> None:
        """See `Engine.stop`. Ends this rank's requests; the engine with the last rank."""
        self._abort_mine()
        await self._idle.wait()
        await self._shared.stop(self._number)

    def _abort_mine(self) -> None:
        for request in list(self._mine):
            self._engine.abort(request)

    def _needs(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            raise NotSupported(self.name, capability)
