"""What engines of Python libraries with data-parallel ranks have in common: vLLM and SGLang.

Each rank publishes its KV events on a socket of its own. Their calls clear all ranks or none, and load adapters for all.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from headwater.engines.control_rules import check_sleep
from headwater.engines.engine import (
    DEFAULT_FIELDS,
    EngineBase,
    EngineDied,
    EngineLoad,
    KvEvent,
    LoraAdapter,
    NotSupported,
)
from headwater.engines.kv_events.socket import KvSocket
from headwater.engines.kv_events.translator import KvTranslator
from headwater.schemas.events.kv import BlocksStored
from headwater.schemas.tables.capability import Capability


class Rank(Protocol):
    """One data-parallel rank."""

    @property
    def socket(self) -> KvSocket:
        """Of its KV events."""
        ...

    @property
    def translator(self) -> KvTranslator:
        """Its cached blocks."""
        ...

    def load(self) -> EngineLoad:
        """Its present load."""
        ...


class AdapterTable(Protocol):
    """The adapters of an engine."""

    async def load(self, adapter: LoraAdapter) -> None:
        """See `Engine.load_lora`."""
        ...

    async def unload(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        ...


AnyRank = TypeVar("AnyRank", bound=Rank)
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
        self._needs("lora")
        await self._loras.load(adapter)

    async def unload_lora(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        self._needs("lora")
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
        self._needs("sleep")
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

    def _needs(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            raise NotSupported(self.name, capability)


def default_sampling(given: Mapping[str, Any]) -> dict[str, float]:
    """A model's own defaults, as its engine reads them from its files, for fields that a request may omit."""
    return {name: given[name] for name in DEFAULT_FIELDS if given.get(name) is not None}
