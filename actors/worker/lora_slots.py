"""LoRA adapters of a worker: the slots of its engine with the requests that use each, their cards, and the list for a restart."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from headwater.actors.runtime.ports import Ports
from headwater.actors.runtime.tables import CardTable, LoraCardChange, ModelCardChange
from headwater.engines.engine import Engine, EngineError, LoraAdapter
from headwater.engines.lora_cache import LoraError
from headwater.events.ports import LogError
from headwater.schemas.clock import Clock
from headwater.schemas.tables import LoraCard

_log = structlog.get_logger("headwater.lora")


class LoraSlot(msgspec.Struct):
    """An adapter in the engine. `pinned`: loaded by an operator, else for a request. `users`: requests that use it."""

    card: LoraCard
    pinned: bool
    used_s: float
    users: int = 0
    unloading: bool = False


class LoraSlots:
    """The engine's `count` slots, by adapter name.

    `on_change` is called when an adapter was loaded or unloaded, or its unloading starts or is abandoned, `on_unload` with the card of one
    that the engine has unloaded.
    """

    def __init__(
        self,
        engine: Engine,
        count: int,
        clock: Clock,
        on_change: Callable[[], None],
        on_unload: Callable[[LoraCard], None],
    ) -> None:
        self.loaded: dict[str, LoraSlot] = {}
        self._engine = engine
        self._count = count
        self._clock = clock
        self._on_change = on_change
        self._on_unload = on_unload
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
        self._on_change()
        _log.info("lora_loaded", lora=card.identity, source=card.source, pinned=pinned)

    async def unload(self, loaded: LoraSlot, within_s: float) -> None:
        """Unload an adapter once no request uses it. Raises `LoraError` 409 past `within_s`: it stays loaded."""
        loaded.unloading = True
        # Published first: routers send no more requests, and edges whose requests still arrive try another worker.
        self._on_change()
        try:
            async with asyncio.timeout(within_s):
                await self._wait_until(lambda: not loaded.users)
        except BaseException as error:
            loaded.unloading = False
            self._on_change()
            if isinstance(error, TimeoutError):
                raise LoraError(
                    409, f"{loaded.users} requests still use adapter {loaded.card.name}: it stays loaded"
                ) from error
            raise
        await self._unload_unused(loaded)

    async def _make_room(self, name: str, *, pinned: bool) -> None:
        while len(occupied := self.loaded.keys() | self._loading) >= self._count:
            if pinned:
                raise LoraError(
                    409,
                    f"no slot is free for {name}: {', '.join(sorted(occupied))} take all {self._count}; "
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
        self._on_change()
        try:
            await self._engine.unload_lora(loaded.card.identity)
            del self.loaded[loaded.card.name]
            self._on_unload(loaded.card)
        finally:
            loaded.unloading = False
            self._changed.set()
            self._on_change()
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


# The cards: which adapters exist, which names are taken, which cards were deleted.

TRIES_MAX = 5
RETRY_S = 1.0


class LoraRegistry:
    """LoRA cards of one pool. All calls raise `LoraError` 502 where the card table does not answer.

    `deleted` queues each card that was deleted, or replaced by one with other weights, `lost` each that was lost with its table.
    """

    def __init__(self, ports: Ports, pool: str) -> None:
        self.deleted: asyncio.Queue[LoraCard] = asyncio.Queue()
        self.lost: asyncio.Queue[LoraCard] = asyncio.Queue()
        self._table = CardTable(ports.cards)
        self._clock = ports.clock
        self._pool = pool
        self._cards: dict[str, LoraCard] = {}
        self._models: dict[str, tuple[str, ...]] = {}

    async def watch(self) -> None:
        """Follow the card table. Does not return."""
        while True:
            try:
                async for changes in self._table.watch():
                    for change in changes:
                        if isinstance(change, ModelCardChange):
                            self._set_model(change)
                        else:
                            self._set_lora(change)
            except LogError as error:
                _log.warning("card_watch_failed", reason=str(error))
            await self._clock.sleep(RETRY_S)

    def _set_model(self, change: ModelCardChange) -> None:
        if change.card is None:
            self._models.pop(change.pool, None)
        else:
            self._models[change.pool] = (change.card.name, *change.card.aliases)

    def _set_lora(self, change: LoraCardChange) -> None:
        if change.lost:
            # No operator has forgotten it: a worker that has it loaded publishes it again.
            if (lost := self._cards.pop(change.key, None)) is not None and lost.pool == self._pool:
                self.lost.put_nowait(lost)
            return
        before = self._cards.pop(change.key, None)
        if change.card is not None:
            self._cards[change.key] = change.card
        if before is None or before.pool != self._pool:
            return
        if change.card is None or change.card.identity != before.identity:
            self.deleted.put_nowait(before)

    def names(self) -> list[str]:
        """Adapters that this pool's workers may load, sorted."""
        return sorted(card.name for card in self._cards.values() if card.pool == self._pool)

    async def read_card(self, name: str) -> LoraCard | None:
        """The card of an adapter, read from the table."""
        try:
            return await self._table.get_lora(self._pool, name)
        except (LogError, msgspec.DecodeError) as error:
            raise LoraError(502, f"the card of adapter {name} cannot be read: {error}") from error

    async def check_name(self, card: LoraCard) -> None:
        """Raises `LoraError` 409 if the name is taken by a model or by another adapter."""
        for names in self._models.values():
            if card.name in names:
                raise LoraError(409, f"{card.name} is a model: give the adapter another name")
        for other in self._cards.values():
            if other.name == card.name and other.pool != card.pool:
                raise LoraError(409, f"{card.name} is an adapter of pool {other.pool}: give it another name")
        _check_same_weights(await self.read_card(card.name), card)

    async def publish_card(self, card: LoraCard) -> None:
        """Make the adapter a model of the fleet. Raises `LoraError` 409 if it has other weights there."""
        for _ in range(TRIES_MAX):
            present = await self.read_card(card.name)
            if present is not None:
                return _check_same_weights(present, card)
            try:
                if await self._table.create_lora(card):
                    return None
            except LogError as error:
                raise LoraError(502, f"the card of adapter {card.name} was not stored: {error}") from error
        raise LoraError(409, f"the card of adapter {card.name} is being changed by others: try again")

    async def delete_card(self, name: str) -> None:
        """Remove the adapter from the fleet's models. Again is fine."""
        try:
            await self._table.delete_lora(self._pool, name)
        except LogError as error:
            raise LoraError(502, f"the card of adapter {name} was not deleted: {error}") from error


def _check_same_weights(present: LoraCard | None, card: LoraCard) -> None:
    if present is not None and present.digest != card.digest:
        raise LoraError(
            409,
            f"adapter {card.name} has other weights in this pool ({present.digest[:12]} from {present.source}, not "
            f"{card.digest[:12]}): give the new ones a name of their own, or forget the old adapter first",
        )


# The adapters loaded before a restart: a file in the machine's cache, used as a hint only.


class RestartList:
    """Names of adapters in the file `path`; None: nothing is kept. An unusable file costs a warning."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def read_names(self) -> tuple[str, ...]:
        """The names written last."""
        if self._path is None:
            return ()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[str, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("lora_restart_list_unreadable", file=str(self._path), reason=str(error))
            return ()

    def write_names(self, names: tuple[str, ...]) -> None:
        """Replace the list, atomically."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(names))
            os.replace(temporary, self._path)
        except OSError as error:
            _log.warning("lora_restart_list_not_written", file=str(self._path), reason=str(error))
