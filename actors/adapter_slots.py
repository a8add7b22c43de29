"""The adapters that an engine holds: so many at once, each with the requests that use it."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from headwater.engines.adapter_files import AdapterError
from headwater.engines.engine import Adapter, Engine, EngineError
from headwater.schemas.card import AdapterCard
from headwater.schemas.clock import Clock

_log = structlog.get_logger("headwater.adapters")


class Held(msgspec.Struct):
    """An adapter in the engine. `asked`: by an operator; else a request made the worker load it."""

    card: AdapterCard
    asked: bool
    used_s: float
    users: int = 0
    leaving: bool = False


class AdapterSlots:
    """The engine's `count` slots, by adapter name.

    `told` is called whenever what is held changes, `out` with the card of each adapter that the engine forgot.
    """

    def __init__(
        self,
        engine: Engine,
        count: int,
        clock: Clock,
        told: Callable[[], None],
        out: Callable[[AdapterCard], None],
    ) -> None:
        self.held: dict[str, Held] = {}
        self._engine = engine
        self._count = count
        self._clock = clock
        self._told = told
        self._out = out
        self._loading: set[str] = set()
        self._moved = asyncio.Event()

    def use(self, identity: str) -> bool:
        """Take note of a request that uses an adapter, if it is held. Each is ended by `used`."""
        held = self._of(identity)
        if held is None or held.leaving:
            return False
        held.users += 1
        held.used_s = self._clock.monotonic_s()
        return True

    def used(self, identity: str) -> None:
        """One request fewer uses it."""
        held = self._of(identity)
        if held is not None:
            held.users -= 1
            held.used_s = self._clock.monotonic_s()
            self._moved.set()

    def leaving(self, identity: str) -> bool:
        """Is it on its way out?"""
        held = self._of(identity)
        return held is not None and held.leaving

    async def settled(self, name: str) -> Held | None:
        """What is held under a name, once nothing is on its way out under it."""
        await self._until(lambda: name not in self.held or not self.held[name].leaving)
        return self.held.get(name)

    async def put(
        self, card: AdapterCard, folder: str, *, asked: bool, confirm: Callable[[], Awaitable[None]]
    ) -> None:
        """Load an adapter, where it has a slot. Nothing is loaded when it, or `confirm` behind it, fails.

        For a request (not `asked`) it waits for a slot: the adapter idle for longest goes, one that nobody asked
        for before the others. Raises `AdapterError` 409 where there is none, else what engine and `confirm` raise.
        """
        await self._make_room(card.name, asked=asked)
        self._loading.add(card.name)
        try:
            try:
                await self._engine.load_lora(Adapter(card.identity, folder, card.rank))
                await confirm()
            except BaseException:
                # Failed or given up on the way: nobody may find it half there.
                await asyncio.shield(self._take_back(card.identity))
                raise
            self.held[card.name] = Held(card, asked, self._clock.monotonic_s())
        finally:
            self._loading.discard(card.name)
            self._moved.set()
        self._told()
        _log.info("adapter_loaded", adapter=card.identity, source=card.source, asked=asked)

    async def empty(self, held: Held, within_s: float) -> None:
        """Take an adapter out once no request uses it. Raises `AdapterError` 409 past `within_s`: it stays."""
        held.leaving = True
        # Told first: routers send nothing more, and edges that come all the same try another worker.
        self._told()
        try:
            async with asyncio.timeout(within_s):
                await self._until(lambda: not held.users)
        except BaseException as error:
            held.leaving = False
            self._told()
            if isinstance(error, TimeoutError):
                raise AdapterError(
                    409, f"{held.users} requests still use adapter {held.card.name}: it stays loaded"
                ) from error
            raise
        await self._take_out(held)

    async def _make_room(self, name: str, *, asked: bool) -> None:
        while len(taken := self.held.keys() | self._loading) >= self._count:
            if asked:
                raise AdapterError(
                    409,
                    f"no slot is free for {name}: {', '.join(sorted(taken))} take all {self._count}; "
                    "unload one, or give the engine more",
                )
            idle = [held for held in self.held.values() if not held.users and not held.leaving]
            if idle:
                await self._take_out(min(idle, key=lambda held: (held.asked, held.used_s)))
            else:
                self._moved.clear()
                await self._moved.wait()

    async def _take_out(self, held: Held) -> None:
        """Out of the engine. Nobody uses it."""
        held.leaving = True
        self._told()
        try:
            await self._engine.unload_lora(held.card.identity)
            del self.held[held.card.name]
            self._out(held.card)
        finally:
            held.leaving = False
            self._moved.set()
            self._told()
        _log.info("adapter_unloaded", adapter=held.card.identity)

    async def _take_back(self, identity: str) -> None:
        try:
            await self._engine.unload_lora(identity)
        except EngineError as error:
            _log.info("adapter_not_taken_back", adapter=identity, reason=str(error))

    def _of(self, identity: str) -> Held | None:
        held = self.held.get(identity.rpartition("@")[0])
        return held if held is not None and held.card.identity == identity else None

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._moved.clear()
            await self._moved.wait()
