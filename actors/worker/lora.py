"""The LoRA adapters of one worker: loaded and unloaded by an operator, or loaded when a request needs one.

    absent ──load, or a request──► loading ──► loaded ──unload, room for another──► unloading ──► absent
                                      └── any failure: absent

The worker publishes its loaded adapters in its status, so routers prefer it for their requests. The card of an adapter
makes it a model at the edges. The card remains when one worker unloads the adapter, so that others still serve or load
it; it is deleted when the adapter is forgotten, and then every worker unloads it.

What an operator loaded is wanted until the operator unloads or forgets it, also by the next process of this worker. What is wanted and
not loaded, because its source or the engine failed, is tried again, and listed as "wanted".

A request that waits is already accepted, so that its edge neither times out nor tries another worker. If loading then
fails, its last step says so, and the edge migrates it. Every request that uses an adapter is counted from here until
its end.
"""

import asyncio
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import structlog

from headwater.actors.limits import DRAIN_TIMEOUT_S
from headwater.actors.runtime.actor import Spawn
from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.inflight import WorkerStatus
from headwater.actors.worker.lora_slots import LoraRegistry, LoraSlots, RestartList
from headwater.actors.worker.settings import LoraLoading
from headwater.engines.engine import (
    Emit,
    Engine,
    EngineDied,
    EngineError,
    EngineInfo,
    EngineLoad,
    NotSupported,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.engines.lora_cache import LoraCache, LoraError, LoraFolder
from headwater.engines.lora_sources import same_base
from headwater.schemas.inference import GenerateRequest
from headwater.schemas.tables import LoraCard

NAME_CHARACTERS_MAX = 200

TRY_S, TRY_S_MAX = 1.0, 60.0
"""Pauses between two tries to load what is wanted, doubled from the first value to the last while one fails."""

_log = structlog.get_logger("headwater.lora")


class LoraSettings(NamedTuple):
    """How a worker handles LoRA adapters.

    `files` fetches them; None: none can be loaded. Unloading waits `unload_s` for requests that still use the adapter.
    `restart_list` keeps the names of wanted adapters over a restart.
    """

    files: LoraCache | None = None
    loading: LoraLoading = LoraLoading()
    unload_s: float = DRAIN_TIMEOUT_S
    restart_list: RestartList = RestartList()


class LoraManager:
    """The adapters of one worker. Loaded adapters are published in `status`; `models` are the names of the base model."""

    def __init__(
        self,
        ports: Ports,
        pool: str,
        engine: Engine,
        info: EngineInfo,
        settings: LoraSettings,
        models: tuple[str, ...],
        status: WorkerStatus,
    ) -> None:
        self.registry = LoraRegistry(ports, pool)
        self.slots = LoraSlots(engine, info.lora_slots, ports.clock, self._publish_loaded, self._drop_files)
        self._clock = ports.clock
        self._pool = pool
        self._engine = engine
        self._info = info
        self._settings = settings
        self._models = models
        self._status = status
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._wanted: dict[str, str] = {}
        """Names of the adapters that an operator loaded, each with the reason why it is not loaded now, if it is not."""

    @property
    def able(self) -> bool:
        """Can this worker load LoRA adapters at all?"""
        return "lora" in self._engine.capabilities and self._info.lora_slots > 0

    @property
    def on_demand(self) -> bool:
        """Does a request that names an adapter make this worker load it?"""
        return self.able and self._settings.loading.on_demand and self._settings.files is not None

    async def run(self) -> None:
        """Load the adapters that are wanted; unload those whose card is deleted. Does not return."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.registry.watch(), name="LoRA cards")
            group.create_task(self._load_wanted(), name="LoRA adapters that are wanted")
            group.create_task(self._publish_lost(), name="LoRA cards that were lost")
            while True:
                await self._unload_deleted(await self.registry.deleted.get())

    async def list(self) -> list[dict[str, Any]]:
        """The loaded adapters and those that are wanted, plain JSON types, by name."""
        missing = [
            {"name": name, "state": "wanted", "reason": reason}
            for name, reason in self._wanted.items()
            if name not in self.slots.loaded
        ]
        loaded = [
            {
                "name": name,
                "source": loaded.card.source,
                "digest": loaded.card.digest,
                "rank": loaded.card.rank,
                "requests": loaded.users,
                "state": "unloading" if loaded.unloading else "loaded",
                "on_demand": not loaded.pinned,
            }
            for name, loaded in self.slots.loaded.items()
        ]
        return sorted([*loaded, *missing], key=lambda adapter: str(adapter["name"]))

    async def load(self, name: str, source: str) -> None:
        """Fetch an adapter and serve it. Again with the same weights is fine.

        Raises `LoraError`: 400 if it is not usable, 403 if the source is not allowed, 404 if there is none, 409
        if the name or all slots are taken, 502 if fetching or loading failed; and `NotSupported`.
        """
        self._require_able()
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
            raise LoraError(400, f"{name[:NAME_CHARACTERS_MAX]!r} is not a usable name for an adapter")
        async with self._lock(name):
            await self._load(name, source, None, pinned=True)
            self._want(name)

    async def unload(self, name: str, *, forget: bool = False) -> None:
        """Stop serving an adapter here, once the requests that use it have ended; `forget`: on all workers. Again is fine.

        Raises `LoraError`: 404 for an unknown name, 409 if it is in use for too long; then it is still served.
        """
        self._require_able()
        if forget or name not in self.slots.loaded:
            known_here = name in self.slots.loaded or name in self._wanted
            if not known_here and await self.registry.read_card(name) is None:
                adapters = ", ".join(self.registry.names()) or "none"
                raise LoraError(404, f"there is no adapter {name}; there are: {adapters}")
            if forget:
                await self.registry.delete_card(name)
        if name not in self.slots.loaded:
            # Before it waits for a load that is in progress.
            self._want(name, wanted=False)
        await self._unload(name)
        self._want(name, wanted=False)

    async def acquire(self, identity: str) -> None:
        """Load the adapter that a request names, from its card's source, and count the request. Raises `EngineError`."""
        name = identity.rpartition("@")[0]
        try:
            async with asyncio.timeout(self._settings.loading.load_s), self._lock(name):
                while not self.slots.acquire(identity):
                    card = await self.registry.read_card(name)
                    if card is None or card.identity != identity:
                        raise LoraError(404, f"adapter {name} is no longer served")
                    await self._load(name, card.source, card, pinned=False)
        except TimeoutError as error:
            raise LoraError(
                502,
                f"adapter {name} was not loaded within {self._settings.loading.load_s:g} s",
            ) from error

    async def _load(self, name: str, source: str, served_card: LoraCard | None, *, pinned: bool) -> None:
        """Load an adapter; its lock is held. `served_card` is its card if it is a model of the fleet already."""
        files = self._require_files()
        fetched = await files.fetch(source, served_card.digest if served_card is not None else "")
        keeps_files = False
        try:
            card = self._make_card(name, source, fetched)
            loaded = await self.slots.wait_settled(name)
            if loaded is not None:
                if loaded.card.digest != card.digest:
                    raise LoraError(
                        409,
                        f"adapter {name} is loaded with other weights ({loaded.card.digest[:12]} from "
                        f"{loaded.card.source}, not {card.digest[:12]}): unload and forget it first",
                    )
                await self._publish_card(card, served_card)
                loaded.pinned = loaded.pinned or pinned
                return
            await self.registry.check_name(card)
            await self.slots.load(
                card,
                str(fetched.folder),
                pinned=pinned,
                confirm=lambda: self._publish_card(card, served_card),
            )
            keeps_files = True
        finally:
            if not keeps_files:
                files.drop(fetched.digest)

    async def _publish_card(self, card: LoraCard, served_card: LoraCard | None) -> None:
        """Write the card for the edges. One that existed and was deleted in the meantime stays deleted."""
        if served_card is None:
            await self.registry.publish_card(card)
            return
        present = await self.registry.read_card(card.name)
        if present is None or present.identity != card.identity:
            raise LoraError(404, f"adapter {card.name} was forgotten while it was loaded")

    async def _unload(self, name: str) -> None:
        async with self._lock(name):
            loaded = await self.slots.wait_settled(name)
            if loaded is not None:
                await self.slots.unload(loaded, self._settings.unload_s)

    async def _publish_lost(self) -> None:
        """Write the cards of loaded adapters again that were lost with their table. Does not return."""
        while True:
            card = await self.registry.lost.get()
            loaded = self.slots.loaded.get(card.name)
            if loaded is None or loaded.card.identity != card.identity:
                continue
            try:
                await self.registry.publish_card(card)
            except EngineError as error:
                _log.warning("lora_card_not_restored", lora=card.identity, reason=str(error))
                self.registry.lost.put_nowait(card)
                await self._clock.sleep(TRY_S)

    async def _unload_deleted(self, card: LoraCard) -> None:
        loaded = self.slots.loaded.get(card.name)
        if loaded is None:
            self._want(card.name, wanted=False)
        if loaded is None or loaded.card.identity != card.identity:
            return
        self._want(card.name, wanted=False)
        try:
            await self._unload(card.name)
        except EngineError as error:
            _log.warning("lora_unload_failed", lora=card.identity, reason=str(error))

    def _want(self, name: str, *, wanted: bool = True) -> None:
        """Note what an operator wants, for this process and the next one of this worker."""
        if wanted == (name in self._wanted):
            return
        if wanted:
            self._wanted[name] = ""
        else:
            del self._wanted[name]
        self._settings.restart_list.write_names(tuple(sorted(self._wanted)))

    async def _load_wanted(self) -> None:
        """Load what an operator had this worker load, as far as the fleet still serves it, until it is loaded. Does not return."""
        self._wanted |= dict.fromkeys(self._settings.restart_list.read_names(), "")
        pause_s = TRY_S
        while True:
            missing = [name for name in self._wanted if name not in self.slots.loaded]
            failed = [name for name in missing if not await self._try_wanted(name)]
            pause_s = min(2 * pause_s, TRY_S_MAX) if failed else TRY_S
            await self._clock.sleep(pause_s)

    async def _try_wanted(self, name: str) -> bool:
        """Load one that is wanted, if a slot is free. False: to be tried again."""
        try:
            card = await self.registry.read_card(name)
            if card is None:
                self._want(name, wanted=False)
                return True
            async with self._lock(name):
                if name in self._wanted and name not in self.slots.loaded:
                    await self._load(name, card.source, card, pinned=True)
        except EngineError as error:
            if self._wanted.get(name, str(error)) != str(error):
                _log.warning("lora_restore_failed", lora=name, reason=str(error))
                self._wanted[name] = str(error)
            return False
        if name in self._wanted:
            self._wanted[name] = ""
        return True

    def _make_card(self, name: str, source: str, folder: LoraFolder) -> LoraCard:
        """The card of a fetched adapter. Raises `LoraError` 400 if this worker cannot serve it."""
        rank_max = self._info.lora_rank_max
        if rank_max and folder.rank > rank_max:
            raise LoraError(
                400, f"adapter {name} has rank {folder.rank}, and this engine takes up to {rank_max}"
            )
        if self._settings.loading.check_base and not same_base(folder.base, self._models):
            raise LoraError(
                400,
                f"adapter {name} was trained on {folder.base}, not on {self._models[0]} "
                "(--no-lora-check-base serves it anyway)",
            )
        return LoraCard(
            name=name,
            pool=self._pool,
            source=source,
            digest=folder.digest,
            rank=folder.rank,
            created_s=self._clock.wall_ns() // 1_000_000_000,
        )

    def _publish_loaded(self) -> None:
        loaded = self.slots.loaded.values()
        self._status.set_loras(tuple(sorted(one.card.identity for one in loaded if not one.unloading)))

    def _drop_files(self, card: LoraCard) -> None:
        self._require_files().drop(card.digest)

    def _require_able(self) -> None:
        if not self.able:
            raise NotSupported(self._engine.name, "lora")

    def _require_files(self) -> LoraCache:
        if self._settings.files is None:
            raise LoraError(
                403, "this worker may not load adapters: --lora-sources names the allowed sources"
            )
        return self._settings.files

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


# The gate: a request whose LoRA adapter must be loaded first waits here, the others pass.


class LoraNotLoaded(RequestRejected):
    """This worker does not serve the adapter at present; another may."""

    retryable = True


class LoraGate:
    """The engine with a gate in front, at which a request waits for its adapter. `manager` is set once the engine is started."""

    def __init__(self, engine: Engine, spawn: Spawn) -> None:
        self.manager: LoraManager | None = None
        self.choreography = engine.choreography
        self.aborts = engine.aborts
        self.notices_fetches = engine.notices_fetches
        self._engine = engine
        self._spawn = spawn
        self._waiting: dict[str, Emit] = {}

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        identity = request.lora_name
        if not identity:
            self._engine.submit(request, emit, transfer)
            return
        manager = self.manager
        if manager is None or not manager.able:
            raise NotSupported(self._engine.name, "lora")
        if manager.slots.acquire(identity):
            self._submit_counted(manager, request, emit, transfer)
        elif manager.slots.is_unloading(identity):
            raise LoraNotLoaded(f"adapter {identity} is being unloaded here")
        elif not manager.on_demand:
            raise LoraNotLoaded(
                f"adapter {identity} is not loaded here, and this worker runs without --lora-on-demand"
            )
        else:
            self._waiting[request.request] = emit
            self._spawn(self._load_and_submit(manager, request, transfer), "LoRA for a request")

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        emit = self._waiting.pop(request, None)
        if emit is not None:
            asyncio.get_running_loop().call_soon(emit, Step((), "abort"))
        else:
            self._engine.abort(request)

    def is_waiting(self, request: str) -> bool:
        """Is the adapter of a request being loaded first?"""
        return request in self._waiting

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return self._engine.load()

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        await self._engine.release(request, params)

    async def _load_and_submit(
        self, manager: LoraManager, request: GenerateRequest, transfer: Transfer | None
    ) -> None:
        problem: EngineError | None = None
        try:
            await manager.acquire(request.lora_name)
        except EngineError as error:
            problem = error
        emit = self._waiting.pop(request.request, None)
        if emit is None:
            # It was aborted while it waited.
            if not problem:
                manager.slots.release(request.lora_name)
        elif problem is not None:
            emit(_failure(problem))
        else:
            try:
                self._submit_counted(manager, request, emit, transfer)
            except EngineError as error:
                emit(_failure(error))

    def _submit_counted(
        self, manager: LoraManager, request: GenerateRequest, emit: Emit, transfer: Transfer | None
    ) -> None:
        def counted(step: Step) -> None:
            if step.finish:
                manager.slots.release(request.lora_name)
            emit(step)

        try:
            self._engine.submit(request, counted, transfer)
        except BaseException:
            manager.slots.release(request.lora_name)
            raise


def _failure(error: EngineError) -> Step:
    """The last step of a request that the engine did not take."""
    return Step((), "died" if isinstance(error, EngineDied) else "error", detail=str(error))
