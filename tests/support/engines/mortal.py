"""A simulated engine whose own processes die, hang or lie while the worker's process lives on, as those of real engines do."""

import asyncio
from typing import Literal

from headwater.engines.engine import Emit, EngineDied, EngineError, EngineInfo, Step, Transfer
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.handoff import SimHandoff
from headwater.schemas.clock import Clock
from headwater.schemas.inference import EmbedRequest, GenerateRequest

Way = Literal["killed", "killed in silence", "broken by a request", "failing", "stopped"]
"""killed: what runs ends with "died", and `check` says it too (vLLM's core or a rank that was killed or raised, SGLang's scheduler
or detokenizer). killed in silence: only `check` says it (a rank whose death nobody but the system knows). broken by a request: as
killed, and the requests are told that it was of them. failing: it says that it is well, and fails every request (a device error
that is caught). stopped: it says that it is well, and nothing comes out any more (SIGSTOP)."""

LIVING: frozenset[Way] = frozenset({"failing", "stopped"})
"""After these the engine claims to live."""


class MortalSim(SimEngine):
    """`end` ends it, or makes it lie."""

    start_s = 0.0
    """How long a start takes, as one that loads a model."""

    def __init__(self, settings: SimSettings, clock: Clock, handoff: SimHandoff | None = None) -> None:
        super().__init__(settings, clock, handoff)
        self.ended: Way | None = None
        self.cause = ""
        self._end = asyncio.Event()

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        await self._clock.sleep(self.start_s)
        return await super().start()

    @property
    def busy(self) -> bool:
        """Does it run a request of an edge?"""
        return any(not name.startswith("canary") for name in self._by_id)

    def end(self, way: Way, cause: str) -> None:
        """Its processes end in this way now. What they kept for other engines is gone."""
        self.ended, self.cause = way, cause
        self._end.set()
        if self._loop is not None:
            self._loop.get_loop().call_soon(self._awake.clear)
        if way in ("killed", "broken by a request", "failing"):
            for sequence in list(self._by_id.values()):
                self._finish(sequence, self._last_step)
        if way not in LIVING:
            self._handoff.stop()

    @property
    def _last_step(self) -> Step:
        finish = {"broken by a request": "fatal", "failing": "error"}.get(self.ended or "", "died")
        return Step((), finish, detail=self.cause)  # type: ignore[arg-type]

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`. A dead engine's front takes requests all the same, and ends them a moment later."""
        if self.ended is None:
            super().submit(request, emit, transfer)
            return
        if self.ended in ("killed", "broken by a request", "failing"):
            asyncio.get_running_loop().call_soon(emit, self._last_step)

    @property
    def pools(self) -> bool:
        """Does it compute vectors?"""
        return bool(self._pooling)

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`."""
        pooling = asyncio.ensure_future(super().embed(request))
        ending = asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait({pooling, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                return await pooling
            if self.ended == "stopped":
                await asyncio.Event().wait()
            raise EngineError(self.cause) if self.ended == "failing" else EngineDied(self.cause)
        finally:
            pooling.cancel()
            ending.cancel()

    async def check(self) -> None:
        """See `Engine.check`."""
        if self.ended is not None and self.ended not in LIVING:
            raise EngineDied(self.cause)
        await super().check()
