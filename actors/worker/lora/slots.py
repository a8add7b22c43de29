"""The LoRA adapters that an engine has loaded: a limited number, each with the count of requests that use it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog

from headwater.engines.engine import Engine, EngineError, LoraAdapter
from headwater.engines.lora_files import LoraError
from headwater.schemas.clock import Clock
from headwater.schemas.tables.card import LoraCard

_log = structlog.get_logger("headwater.lora")


class LoraSlot(msgspec.Struct):
    """An adapter in the engine. `pinned`: loaded by an operator, else for a request. `users`: requests that use it."""

    card: LoraCard
    pinned: bool
    used_s: float
    users: int = 0
    unloading: bool = False


class SlotObserver(Protocol):
    """What is called when the slots change."""

    def on_loras_changed(self) -> None:
        """An adapter was loaded or unloaded, or its unloading starts or is abandoned."""
        ...

    def on_lora_unloaded(self, card: LoraCard) -> None:
        """The engine has unloaded an adapter."""
        ...


class LoraSlots:
    """The engine's `count` slots, by adapter name."""

    def __init__(self, engine: Engine, count: int, clock: Clock, observer: SlotObserver) -> None:
        self.loaded: dict[str, LoraSlot] = {}
        self._engine = engine
        self._count = count
        self._clock = clock
        self._observer = observer
        self._loading: set[str] = set()
        self._changed = asyncio.Event()

    def acquire(self, identity: str) -> bool:
        """Count a request that uses an adapter, if it is loaded. Each is ended by `release`."""
        loaded = self._find(identity)
        if loaded is None or loaded.unloading:
            return False
        loaded.users += 1
        loaded.used_s = self._clock.monotonic_s()
        return True

    def release(self, identity: str) -> None:
        """A request that used the adapter has ended."""
        loaded = self._find(identity)
        if loaded is not None:
            loaded.users -= 1
            loaded.used_s = self._clock.monotonic_s()
            self._changed.set()

    def is_unloading(self, identity: str) -> bool:
        """Is the adapter being unloaded?"""
        loaded = self._find(identity)
        return loaded is not None and loaded.unloading

    async def wait_settled(self, name: str) -> LoraSlot | None:
        """The adapter loaded under a name, once none is being unloaded under it."""
        await self._wait_until(lambda: name not in self.loaded or not self.loaded[name].unloading)
        return self.loaded.get(name)

    async def load(
        self, card: LoraCard, folder: str, *, pinned: bool, confirm: Callable[[], Awaitable[None]]
    ) -> None:
        """Load an adapter into a slot. If it, or `confirm` after it, fails, nothing stays loaded.

        For a request (not `pinned`) it waits for a slot: the adapter idle for longest is unloaded, one that is not
        pinned before the others. Raises `LoraError` 409 where there is none, else what engine and `confirm` raise.
        """
        await self._make_room(card.name, pinned=pinned)
        self._loading.add(card.name)
        try:
            try:
                await self._engine.load_lora(LoraAdapter(card.identity, folder, card.rank))
                await confirm()
            except BaseException:
                # Failed or cancelled: no request may find it half loaded.
                await asyncio.shield(self._roll_back(card.identity))
                raise
            self.loaded[card.name] = LoraSlot(card, pinned, self._clock.monotonic_s())
        finally:
            self._loading.discard(card.name)
            self._changed.set()
        self._observer.on_loras_changed()
        _log.info("lora_loaded", lora=card.identity, source=card.source, pinned=pinned)

    async def unload(self, loaded: LoraSlot, within_s: float) -> None:
        """Unload an adapter once no request uses it. Raises `LoraError` 409 past `within_s`: it stays loaded."""
        loaded.unloading = True
        # Published first: routers send no more requests, and edges whose requests still arrive try another worker.
        self._observer.on_loras_changed()
        try:
            async with asyncio.timeout(within_s):
                await self._wait_until(lambda: not loaded.users)
        except BaseException as error:
            loaded.unloading = False
            self._observer.on_loras_changed()
            if isinstance(error, TimeoutError):
                raise LoraError(
                    409, f"{loaded.users} requests still use adapter {loaded.card.name}: it stays loaded"
                ) from error
            raise
        await self._unload_unused(loaded)

    async def _make_room(self, name: str, *, pinned: bool) -> None:
        while len(taken := self.loaded.keys() | self._loading) >= self._count:
            if pinned:
                raise LoraError(
                    409,
                    f"no slot is free for {name}: {', '.join(sorted(taken))} take all {self._count}; "
                    "unload one, or give the engine more",
                )
            idle = [loaded for loaded in self.loaded.values() if not loaded.users and not loaded.unloading]
            if idle:
                await self._unload_unused(min(idle, key=lambda loaded: (loaded.pinned, loaded.used_s)))
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _unload_unused(self, loaded: LoraSlot) -> None:
        loaded.unloading = True
        self._observer.on_loras_changed()
        try:
            await self._engine.unload_lora(loaded.card.identity)
            del self.loaded[loaded.card.name]
            self._observer.on_lora_unloaded(loaded.card)
        finally:
            loaded.unloading = False
            self._changed.set()
            self._observer.on_loras_changed()
        _log.info("lora_unloaded", lora=loaded.card.identity)

    async def _roll_back(self, identity: str) -> None:
        try:
            await self._engine.unload_lora(identity)
        except EngineError as error:
            _log.info("lora_rollback_failed", lora=identity, reason=str(error))

    def _find(self, identity: str) -> LoraSlot | None:
        loaded = self.loaded.get(identity.rpartition("@")[0])
        return loaded if loaded is not None and loaded.card.identity == identity else None

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
