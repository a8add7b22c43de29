"""The LoRA adapters of one worker: loaded and unloaded by an operator, or loaded when a request needs one.

    absent ──load, or a request──► loading ──► held ──unload, room for another──► leaving ──► absent
                                      └── any failure: absent again

A held adapter is told to the fleet (`Standing.loras`), so routers prefer this worker; its card makes it a model at
the edges. The card stays when a worker unloads the adapter, so that others still serve it or load it; it goes when
somebody says that the adapter is to be forgotten, and then every worker unloads it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import structlog

from headwater.actors.adapter_cards import AdapterCards
from headwater.actors.adapter_memory import AdapterMemory
from headwater.actors.adapter_slots import AdapterSlots
from headwater.actors.world import World
from headwater.engines.adapter_files import AdapterError, AdapterFiles, AdapterFolder
from headwater.engines.adapter_files.peft import same_base
from headwater.engines.engine import Engine, EngineError, EngineInfo, NotSupported
from headwater.schemas.card import AdapterCard

NAME_CHARACTERS_MAX = 200

_log = structlog.get_logger("headwater.adapters")


class AdapterSettings(NamedTuple):
    """How a worker handles adapters.

    `files` fetches them, None: none can be loaded. `on_demand`: a request may make it load one, within `load_s`
    seconds. Unloading waits `unload_s` for requests that still use the adapter. `check_base`: an adapter must name
    this model as the one that it was trained on, if it names one.
    """

    files: AdapterFiles | None = None
    on_demand: bool = False
    load_s: float = 120.0
    unload_s: float = 30.0
    check_base: bool = True
    memory: AdapterMemory = AdapterMemory()


class Adapters:
    """See the module. `tell` is given what is held whenever that changes; `models` are names of the base model."""

    def __init__(
        self,
        world: World,
        pool: str,
        engine: Engine,
        info: EngineInfo,
        settings: AdapterSettings,
        models: tuple[str, ...],
        tell: Callable[[tuple[str, ...]], None],
    ) -> None:
        self.cards = AdapterCards(world, pool, self._on_gone)
        self.slots = AdapterSlots(engine, info.lora_slots, world.clock, self._told, self._out)
        self._world = world
        self._pool = pool
        self._engine = engine
        self._info = info
        self._settings = settings
        self._models = models
        self._tell = tell
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._gone: asyncio.Queue[AdapterCard] = asyncio.Queue()
        self._kept: tuple[str, ...] = ()

    @property
    def able(self) -> bool:
        """Can this worker hold adapters at all?"""
        return "lora" in self._engine.capabilities and self._info.lora_slots > 0

    @property
    def on_demand(self) -> bool:
        """Does a request that names an adapter make this worker load it?"""
        return self.able and self._settings.on_demand and self._settings.files is not None

    async def run(self) -> None:
        """Follow the cards, and unload what is forgotten, for ever. What was held before a restart comes back."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cards.follow(), name="adapter cards")
            group.create_task(self._restore(), name="adapters held before")
            while True:
                await self._unload_gone(await self._gone.get())

    async def list(self) -> list[dict[str, Any]]:
        """What is held, plain JSON types, by name."""
        return [
            {
                "name": name,
                "source": held.card.source,
                "digest": held.card.digest,
                "rank": held.card.rank,
                "requests": held.users,
                "state": "leaving" if held.leaving else "held",
                "on_demand": not held.asked,
            }
            for name, held in sorted(self.slots.held.items())
        ]

    async def load(self, name: str, source: str) -> None:
        """Fetch an adapter and serve it. Again with the same weights is fine.

        Raises `AdapterError`: 400 for what is not usable, 403 for a source that is not allowed, 404 for none, 409
        where name or slots are taken, 502 for what failed; and `NotSupported`.
        """
        self._check_able()
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
            raise AdapterError(400, f"{name[:NAME_CHARACTERS_MAX]!r} is no usable name for an adapter")
        async with self._lock(name):
            await self._load(name, source, None, asked=True)

    async def unload(self, name: str, *, forget: bool = False) -> None:
        """Serve it no more here, once the requests that use it have ended; `forget`: nowhere. Again is fine.

        Raises `AdapterError`: 404 for an unknown name, 409 where it is used for too long; then it is still served.
        """
        self._check_able()
        if forget or name not in self.slots.held:
            if await self.cards.find(name) is None and name not in self.slots.held:
                known = ", ".join(self.cards.names()) or "none"
                raise AdapterError(404, f"there is no adapter {name}; there are: {known}")
            if forget:
                await self.cards.forget(name)
        await self._unload(name)

    async def demand(self, identity: str) -> None:
        """Load the adapter that a request names, from where its card says, and `use` it. Raises `EngineError`."""
        name = identity.rpartition("@")[0]
        try:
            async with asyncio.timeout(self._settings.load_s), self._lock(name):
                while not self.slots.use(identity):
                    card = await self.cards.find(name)
                    if card is None or card.identity != identity:
                        raise AdapterError(404, f"adapter {name} is not served any more")
                    await self._load(name, card.source, card, asked=False)
        except TimeoutError as error:
            raise AdapterError(
                502, f"adapter {name} was not loaded within {self._settings.load_s:g} s (--lora-load-s)"
            ) from error

    async def _load(self, name: str, source: str, known: AdapterCard | None, *, asked: bool) -> None:
        """Under the adapter's lock. With the card that is `known` where it is a model of the fleet already."""
        files = self._files()
        found = await files.fetch(source, known.digest if known is not None else "")
        kept = False
        try:
            card = self._card(name, source, found)
            held = await self.slots.settled(name)
            if held is not None:
                if held.card.digest != card.digest:
                    raise AdapterError(
                        409,
                        f"adapter {name} is loaded with other weights ({held.card.digest[:12]} from "
                        f"{held.card.source}, not {card.digest[:12]}): unload and forget it first",
                    )
                await self._make_known(card, known)
                held.asked = held.asked or asked
                return
            await self.cards.check(card)
            await self.slots.put(
                card, str(found.folder), asked=asked, confirm=lambda: self._make_known(card, known)
            )
            kept = True
        finally:
            if not kept:
                files.drop(found.digest)

    async def _make_known(self, card: AdapterCard, known: AdapterCard | None) -> None:
        """Put the card where edges see it. One that was there and is gone was forgotten, and stays so."""
        if known is None:
            await self.cards.publish(card)
            return
        present = await self.cards.find(card.name)
        if present is None or present.identity != card.identity:
            raise AdapterError(404, f"adapter {card.name} was forgotten while it was loaded")

    async def _unload(self, name: str) -> None:
        async with self._lock(name):
            held = await self.slots.settled(name)
            if held is not None:
                await self.slots.empty(held, self._settings.unload_s)

    def _on_gone(self, card: AdapterCard) -> None:
        self._gone.put_nowait(card)

    async def _unload_gone(self, card: AdapterCard) -> None:
        """What is forgotten anywhere goes everywhere."""
        held = self.slots.held.get(card.name)
        if held is None or held.card.identity != card.identity:
            return
        try:
            await self._unload(card.name)
        except EngineError as error:
            _log.warning("adapter_not_unloaded", adapter=card.identity, reason=str(error))

    async def _restore(self) -> None:
        """What this worker held before it was started again, as far as it still is in the fleet."""
        for name in self._settings.memory.recall():
            try:
                card = await self.cards.find(name)
                if card is not None:
                    async with self._lock(name):
                        await self._load(name, card.source, card, asked=True)
            except EngineError as error:
                _log.warning("adapter_not_restored", adapter=name, reason=str(error))

    def _card(self, name: str, source: str, found: AdapterFolder) -> AdapterCard:
        """The card of what was fetched, if this worker can serve it."""
        most = self._info.lora_rank_max
        if most and found.rank > most:
            raise AdapterError(
                400, f"adapter {name} has rank {found.rank}, and this engine takes up to {most}"
            )
        if self._settings.check_base and not same_base(found.base, self._models):
            raise AdapterError(
                400,
                f"adapter {name} was trained on {found.base}, not on {self._models[0]} "
                "(--lora-check-base no serves it all the same)",
            )
        created_s = self._world.clock.wall_ns() // 1_000_000_000
        return AdapterCard(
            name=name,
            pool=self._pool,
            source=source,
            digest=found.digest,
            rank=found.rank,
            created_s=created_s,
        )

    def _told(self) -> None:
        held = self.slots.held.values()
        self._tell(tuple(sorted(one.card.identity for one in held if not one.leaving)))
        names = tuple(sorted(self.slots.held))
        if names != self._kept:
            self._kept = names
            self._settings.memory.keep(names)

    def _out(self, card: AdapterCard) -> None:
        self._files().drop(card.digest)

    def _check_able(self) -> None:
        if not self.able:
            raise NotSupported(self._engine.name, "lora")

    def _files(self) -> AdapterFiles:
        if self._settings.files is None:
            raise AdapterError(403, "this worker may load no adapters: --lora-sources says from where it may")
        return self._settings.files

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
