"""What control commands use of a worker."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.lifecycle.health import EngineHealth
from headwater.actors.worker.lifecycle.incarnation import Incarnation
from headwater.actors.worker.serving.inflight import Inflight
from headwater.actors.worker.serving.status import WorkerStatus
from headwater.engines.engine import Engine, EngineInfo


class LoraOperations(Protocol):
    """The LoRA adapters of one worker. Errors are `EngineError`s; their `status`, if they have one, is the reply's."""

    async def load(self, name: str, source: str) -> None:
        """Fetch an adapter and serve it. Again is fine."""
        ...

    async def unload(self, name: str, *, forget: bool = False) -> None:
        """Stop serving it on this worker; `forget`: on all workers, and delete its card."""
        ...

    async def list(self) -> Sequence[dict[str, Any]]:
        """The loaded adapters: plain JSON types, each with its `name`."""
        ...


class WorkerContext(Protocol):
    """Implemented by `WorkerActor`."""

    name: str
    ports: Ports
    engine: Engine
    status: WorkerStatus
    inflight: Inflight
    health: EngineHealth
    lora: LoraOperations | None
    """None for a worker without LoRA."""
    drain_s: float
    """Seconds that requests in flight have to finish when the worker stops."""

    @property
    def pool(self) -> str:
        """The pool that the worker serves."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it started."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the present incarnation, or of the last one."""
        ...

    @property
    def incarnation(self) -> Incarnation | None:
        """The present incarnation; None between two."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `Actor.spawn`."""
        ...

    def stop(self) -> None:
        """See `Actor.stop`."""
        ...

    def abort_all(self) -> None:
        """Abort all requests in flight: their edges migrate them."""
        ...
