"""The engine as requests see it: a request whose LoRA adapter must be loaded first waits here, the others pass.

A request that waits is already accepted, so that its edge neither times out nor tries another worker. If loading then
fails, its last step says so, and the edge migrates it. Every request that uses an adapter is counted from here until
its end.
"""

import asyncio

from headwater.actors.runtime.tasks import Spawn
from headwater.actors.worker.lora.manager import LoraManager
from headwater.engines.engine import (
    Emit,
    Engine,
    EngineDied,
    EngineError,
    EngineLoad,
    NotSupported,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.schemas.messages.inference import GenerateRequest


class LoraNotLoaded(RequestRejected):
    """This worker does not serve the adapter at present; another may."""

    retryable = True


class LoraGate:
    """See the module. `manager` is set once the engine is started."""

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
