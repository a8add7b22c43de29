"""The engine as requests see it: those whose adapter must be loaded first wait here, and the others pass.

A request that waits is taken already, so that its edge neither times out nor asks somewhere else; what then fails is
told in its last step, and the edge moves it. Every request that uses an adapter is counted from here to its end.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headwater.actors.adapters import Adapters
from headwater.engines.engine import (
    Emit,
    Engine,
    EngineError,
    EngineLoad,
    NotSupported,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.schemas.inference import GenerateRequest

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class AdapterElsewhere(RequestRejected):
    """This worker does not serve the adapter now; another may."""

    retryable = True


class AdapterGate:
    """See the module. `adapters` is set once the engine is started."""

    def __init__(self, engine: Engine, spawn: Spawn) -> None:
        self.adapters: Adapters | None = None
        self.choreography = engine.choreography
        self._engine = engine
        self._spawn = spawn
        self._waiting: dict[str, Emit] = {}

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        identity = request.lora_name
        if not identity:
            self._engine.submit(request, emit, transfer)
            return
        adapters = self.adapters
        if adapters is None or not adapters.able:
            raise NotSupported(self._engine.name, "lora")
        if adapters.slots.use(identity):
            self._submit(adapters, request, emit, transfer)
        elif adapters.slots.leaving(identity):
            raise AdapterElsewhere(f"adapter {identity} is being unloaded here")
        elif not adapters.on_demand:
            raise AdapterElsewhere(f"adapter {identity} is not loaded here, and --lora-on-demand is no")
        else:
            self._waiting[request.request] = emit
            self._spawn(self._later(adapters, request, transfer), "adapter for a request")

    def abort(self, request: str) -> None:
        """See `Engine.abort`."""
        emit = self._waiting.pop(request, None)
        if emit is not None:
            asyncio.get_running_loop().call_soon(emit, Step((), "abort"))
        else:
            self._engine.abort(request)

    def waits(self, request: str) -> bool:
        """Is the adapter of a request loaded first?"""
        return request in self._waiting

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return self._engine.load()

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        await self._engine.release(request, params)

    async def _later(self, adapters: Adapters, request: GenerateRequest, transfer: Transfer | None) -> None:
        problem = ""
        try:
            await adapters.demand(request.lora_name)
        except EngineError as error:
            problem = str(error)
        emit = self._waiting.pop(request.request, None)
        if emit is None:
            # Nobody waits for it any more.
            if not problem:
                adapters.slots.used(request.lora_name)
        elif problem:
            emit(Step((), "error", detail=problem))
        else:
            try:
                self._submit(adapters, request, emit, transfer)
            except RequestRejected as error:
                emit(Step((), "error", detail=str(error)))

    def _submit(
        self, adapters: Adapters, request: GenerateRequest, emit: Emit, transfer: Transfer | None
    ) -> None:
        def counted(step: Step) -> None:
            if step.finish:
                adapters.slots.used(request.lora_name)
            emit(step)

        try:
            self._engine.submit(request, counted, transfer)
        except BaseException:
            adapters.slots.used(request.lora_name)
            raise
