"""A simulated engine that can do everything that control asks of one, and can be broken in every way.

For tests of the actors: what engines really do is the contract suite's matter.
"""

import asyncio

from headwater.engines.engine import (
    Emit,
    EngineDied,
    EngineError,
    EngineInfo,
    KvEvent,
    PauseMode,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.schemas.clock import Clock
from headwater.schemas.events import BlocksStored
from headwater.schemas.inference import EmbedRequest, GenerateRequest
from headwater.schemas.tables import Capability


class _Stopping:
    """A clock on which the scheduler stands still while the engine is paused or hangs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.go = asyncio.Event()
        self.go.set()

    def wall_ns(self) -> int:
        """See `Clock.wall_ns`."""
        return self._clock.wall_ns()

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._clock.monotonic_s()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await self._clock.sleep(seconds)
        await self.go.wait()


class ControlledSim(SimEngine):
    """`calls` lists what was asked of it. `fails` names calls that fail, `hangs` makes it answer nothing."""

    capabilities: frozenset[Capability] = SimEngine.capabilities - {"lora"} | {
        "sleep",
        "pause",
        "profile",
        "handoff",
        "embed",
    }

    def __init__(self, settings: SimSettings, clock: Clock) -> None:
        self.stopping = _Stopping(clock)
        super().__init__(settings, self.stopping)
        self.calls: list[str] = []
        self.asked: list[GenerateRequest] = []
        self.released: list[str] = []
        self.fails: set[str] = set()
        self.refuses = ""
        self.broken = ""
        self.dead = ""
        self.dies_of = ""
        self.asleep = 0
        self.embed_s = 60.0
        self.books: list[BlocksStored] = []
        self.no_sleep = asyncio.Event()
        self.no_sleep.set()

    def hang(self) -> None:
        """From now on nothing comes out of it, and it says that it is well."""
        self.stopping.go.clear()

    def announce(self, events: list[KvEvent]) -> None:
        """KV events, as if a step had filled blocks."""
        self._events.add(events)

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        self.asked.append(request)
        if self.refuses:
            raise RequestRejected(self.refuses)
        if self.asleep:
            raise AssertionError(f"{request.request} came to an engine that sleeps")
        if self.dead and not request.request.startswith("canary"):
            raise EngineDied(self.dead)
        if self.dies_of:
            # The process is gone, which its own check has not seen yet.
            asyncio.get_running_loop().call_soon(emit, Step((), "died", detail=self.dies_of))
            return
        if self.broken:
            asyncio.get_running_loop().call_soon(emit, Step((), "error", detail=self.broken))
            return
        super().submit(request, emit, transfer)

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`."""
        self.released.append(request)
        await super().release(request, params)

    async def embed(self, request: EmbedRequest) -> tuple[bytes, ...]:
        """See `Engine.embed`. It takes `embed_s` seconds, and then as long as the engine is stopped."""
        if not request.request.startswith("canary"):
            await self.stopping.sleep(self.embed_s)
        return (b"\0\0\0\0",) * len(request.prompts)

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`. Says nothing of its blocks, as engines may."""
        self._called(f"sleep {level}")
        await self.no_sleep.wait()
        load = self.load()
        if load.running or load.waiting:
            raise AssertionError(f"asked to sleep with {load.running} running, {load.waiting} waiting")
        self.asleep = level

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._called("wake")
        self.asleep = 0

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        self._called(f"pause {mode}")
        self.stopping.go.clear()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._called("resume")
        self.stopping.go.set()

    async def profile(self, *, on: bool) -> None:
        """See `Engine.profile`."""
        self._called(f"profile {on}")

    async def clear_kv(self) -> None:
        """See `Engine.clear_kv`. With `books` it forgets nothing in them."""
        self._called("clear-kv")
        await super().clear_kv()

    def held_blocks(self) -> list[BlocksStored]:
        """See `Engine.held_blocks`."""
        return [*super().held_blocks(), *self.books]

    async def check(self) -> None:
        """See `Engine.check`."""
        if self.dead:
            raise EngineDied(self.dead)
        await super().check()

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what in self.fails:
            raise EngineError(f"no {what} today")


class SilentSim(ControlledSim):
    """Starts, and never answers."""

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        self.hang()
        return await super().start()
