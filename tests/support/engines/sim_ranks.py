"""An engine of several data-parallel ranks for tests: simulated engines side by side, started and stopped as one."""

from collections.abc import AsyncIterator

from headwater.engines.engine import Emit, EngineDied, EngineInfo, EngineLoad, KvEvent, Transfer
from headwater.engines.sim import ZERO
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.schemas.clock import SystemClock
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import GenerateRequest

SETTINGS = SimSettings(total_blocks=64, step_time=ZERO, context_length=512)


class SimRanks(SimEngine):
    """See `headwater.engines.ranked.RankedEngine`."""

    def __init__(self, ranks: int) -> None:
        super().__init__(SETTINGS, SystemClock())
        self.ranks = ranks
        self.engines = [SimEngine(SETTINGS, SystemClock()) for _ in range(ranks)]
        self.starts = self.stops = 0
        self.dead = False

    async def start(self) -> EngineInfo:
        """Start all."""
        self.starts += 1
        infos = [await engine.start() for engine in self.engines]
        return infos[0]

    def submit(
        self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None, *, rank: int = 0
    ) -> None:
        """To one of them."""
        self.engines[rank].submit(request, emit, transfer)

    def abort(self, request: str) -> None:
        """To all of them."""
        for engine in self.engines:
            engine.abort(request)

    def kv_events(self, *, rank: int = 0) -> AsyncIterator[list[KvEvent]]:
        """Of one of them."""
        return self.engines[rank].kv_events()

    def held_blocks(self, *, rank: int = 0) -> list[BlocksStored]:
        """Of one of them."""
        return self.engines[rank].held_blocks()

    def load(self, *, rank: int = 0) -> EngineLoad:
        """Of one of them."""
        return self.engines[rank].load()

    async def check(self) -> None:
        """Of the whole."""
        if self.dead:
            raise EngineDied("the whole engine died")

    async def stop(self) -> None:
        """Stop all."""
        self.stops += 1
        for engine in self.engines:
            await engine.stop()
