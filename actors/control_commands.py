"""What each control command does to a worker. States: ready, draining, paused, sleeping; see `Standing`.

                 ready      draining   paused     sleeping
    drain        draining   waits      409        409
    pause        paused     paused     paused     409
    sleep        sleeping   sleeping   409        sleeping (409 for another level)
    resume       ready      ready      ready      409: wake
    wake         409        409        409        ready

A command that fails leaves the state as it was.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from headwater.actors.control_arguments import (
    Arguments,
    Drain,
    LoadLora,
    Pause,
    Sleep,
    Taint,
    ToRole,
    UnloadLora,
)
from headwater.actors.control_guards import ENGINE_S_MAX, Refusal, Undo, engine_time
from headwater.actors.work import over_within
from headwater.engines.engine import Capability, EngineError, NotSupported
from headwater.schemas.control import Command, ControlReply
from headwater.schemas.fleet import WorkerState

if TYPE_CHECKING:
    from headwater.actors.control import Adapters
    from headwater.actors.engine import EngineActor

ABORT_S_MAX = 10.0
FETCH_S_MAX = 120.0


class Commands:
    """See the module. Called one at a time, looks aside. `give_up` ends a drain that waits."""

    def __init__(self, actor: "EngineActor") -> None:
        self.adapters: Adapters | None = None
        self.give_up = asyncio.Event()
        self._actor = actor
        self._began_s = actor.world.clock.monotonic_s()
        self._level = 0
        self._all: dict[Command, Callable[[Any], Awaitable[ControlReply]]] = {
            "status": self._status,
            "sleep": self._sleep,
            "wake": self._wake,
            "clear-kv": self._clear_kv,
            "pause": self._pause,
            "resume": self._resume,
            "drain": self._drain,
            "profile-start": lambda _: self._profile(on=True),
            "profile-stop": lambda _: self._profile(on=False),
            "role": self._role,
            "load-lora": self._load_lora,
            "unload-lora": self._unload_lora,
            "list-loras": self._list_loras,
            "taint": lambda asked: self._taint(asked, on=True),
            "untaint": lambda asked: self._taint(asked, on=False),
            "stop": self._stop,
        }

    async def run(self, command: Command, arguments: Arguments) -> ControlReply:
        """Do it. Raises `Refusal`, `EngineError`, TimeoutError, and what adapters raise."""
        return await self._all[command](arguments)

    async def _status(self, _: Arguments) -> ControlReply:
        actor = self._actor
        standing, load = actor.standing, actor.engine.load()
        state = "stopping" if actor.stopping else standing.state
        return ControlReply(
            200,
            state,
            {
                "worker": actor.name,
                "pool": actor.pool,
                "engine": actor.engine.name,
                "model": actor.info.model,
                "state": state,
                "sleep_level": self._level,
                "role": standing.role,
                "tier": standing.tier,
                "taints": list(standing.taints),
                "epoch": actor.epoch,
                "load": load._asdict(),
                "requests": len(actor.work),
                "handoffs": actor.work.handoffs,
                "loras": list(standing.loras),
                "capabilities": sorted(actor.engine.capabilities),
                "uptime_s": round(actor.world.clock.monotonic_s() - self._began_s, 1),
            },
        )

    async def _sleep(self, asked: Sleep) -> ControlReply:
        self._need("sleep")
        actor, before = self._actor, self._state
        if before == "sleeping":
            if asked.level == self._level:
                return ControlReply(200, f"asleep at level {self._level} already")
            raise Refusal(409, f"asleep at level {self._level}: wake it first")
        if before == "paused":
            raise Refusal(409, "paused: resume it first")
        with self._undone_if_it_fails(before):
            self._become("draining")
            moved = await self._empty(asked.within_s)
            async with actor.health.still(), engine_time("sleep"):
                if "clear_kv" in actor.engine.capabilities:
                    # Blocks that outlive a sleep in an engine's books would be hits on garbage after it.
                    await actor.engine.clear_kv()
                await actor.engine.sleep(asked.level)
            self._level = asked.level
            self._become("sleeping")
        self._announce()
        return ControlReply(200, f"asleep at level {asked.level}", {"moved": moved})

    async def _wake(self, _: Arguments) -> ControlReply:
        self._need("sleep")
        actor = self._actor
        if self._state != "sleeping":
            raise Refusal(409, f"it is {self._state}, not asleep")
        async with actor.health.still(), engine_time("wake"):
            await actor.engine.wake()
            await actor.health.canary(actor.info, ENGINE_S_MAX)
        self._level = 0
        self._become("ready")
        self._announce()
        return ControlReply(200, "awake")

    async def _clear_kv(self, _: Arguments) -> ControlReply:
        self._need("clear_kv")
        if self._state == "sleeping":
            raise Refusal(409, "asleep: it holds no blocks")
        async with engine_time("clear-kv"):
            await self._actor.engine.clear_kv()
        self._announce()
        return ControlReply(200, "cleared", {"held_requests": len(self._actor.work)})

    async def _pause(self, asked: Pause) -> ControlReply:
        self._need("pause")
        actor, before = self._actor, self._state
        if before == "paused":
            return ControlReply(200, "paused already")
        if before == "sleeping":
            raise Refusal(409, "asleep: nothing to pause")
        moved = 0
        with self._undone_if_it_fails(before):
            self._become("paused")
            if asked.mode != "keep":
                moved = await self._empty(asked.within_s if asked.mode == "wait" else 0.0)
            async with actor.health.still(), engine_time("pause"):
                await actor.engine.pause(asked.mode)
        kept = len(actor.work)
        return ControlReply(200, f"paused, {kept} requests kept", {"moved": moved, "kept": kept})

    async def _resume(self, _: Arguments) -> ControlReply:
        if self._state == "sleeping":
            raise Refusal(409, "asleep: wake it")
        if self._state == "ready":
            return ControlReply(200, "ready already")
        if self._state == "paused":
            async with engine_time("resume"):
                await self._actor.engine.resume()
        self._become("ready")
        return ControlReply(200, "ready")

    async def _drain(self, asked: Drain) -> ControlReply:
        if self._state in ("paused", "sleeping"):
            raise Refusal(409, f"{self._state}: {'resume' if self._state == 'paused' else 'wake'} it first")
        self._become("draining")
        moved = await self._empty(asked.within_s)
        return ControlReply(200, "drained: it takes nothing until resumed", {"moved": moved})

    async def _profile(self, *, on: bool) -> ControlReply:
        self._need("profile")
        async with engine_time("profile"):
            await self._actor.engine.profile(on=on)
        return ControlReply(
            200, "profiling" if on else "the profile is written where the engine's settings say"
        )

    async def _role(self, asked: ToRole) -> ControlReply:
        actor = self._actor
        if asked.role == actor.standing.role:
            return ControlReply(200, f"role {asked.role} already")
        if asked.role != "both":
            self._need("handoff")
        if len(actor.work) or actor.work.handoffs:
            raise Refusal(
                409,
                f"{len(actor.work)} requests run, {actor.work.handoffs} hand-offs are held: drain it first",
            )
        # Nothing waits between the question and this: no request comes in between.
        actor.standing = actor.standing._replace(role=asked.role)
        self._tell_standing()
        then = "" if self._state == "ready" else f"; it is {self._state}"
        return ControlReply(200, f"role {asked.role}{then}", {"state": self._state})

    async def _load_lora(self, asked: LoadLora) -> ControlReply:
        await self._require_adapters().load(asked.name, asked.source)
        return ControlReply(200, f"loaded {asked.name}", {"loras": list(self._actor.standing.loras)})

    async def _unload_lora(self, asked: UnloadLora) -> ControlReply:
        await self._require_adapters().unload(asked.name, forget=asked.forget)
        return ControlReply(200, f"unloaded {asked.name}", {"loras": list(self._actor.standing.loras)})

    async def _list_loras(self, _: Arguments) -> ControlReply:
        held = list(await self._require_adapters().list())
        return ControlReply(200, f"{len(held)} adapters", {"loras": held})

    async def _taint(self, asked: Taint, *, on: bool) -> ControlReply:
        taints = set(self._actor.standing.taints)
        if (asked.name in taints) == on:
            return ControlReply(200, f"{'tainted' if on else 'not tainted'} {asked.name} already")
        taints ^= {asked.name}
        self._actor.standing = self._actor.standing._replace(taints=tuple(sorted(taints)))
        self._tell_standing()
        done = "tainted" if on else "no longer tainted"
        return ControlReply(200, f"{done} {asked.name}", {"taints": sorted(taints)})

    async def _stop(self, asked: Drain) -> ControlReply:
        """The actor is stopped by whoever sends this answer, behind it."""
        if asked.within_s is not None:
            self._actor.drain_s = asked.within_s
        return ControlReply(200, f"stopping: what runs has {self._actor.drain_s:g} s to finish")

    @property
    def _state(self) -> WorkerState:
        return self._actor.standing.state

    def _become(self, state: WorkerState) -> None:
        if state != self._state:
            self._actor.standing = self._actor.standing._replace(state=state)
            self._actor.intake.progress.clock.doubt()
            self._tell_standing()

    def _tell_standing(self) -> None:
        # Between two lives there is nobody to tell; the next one begins with it.
        if self._actor.life is not None:
            self._actor.life.changed()

    def _announce(self) -> None:
        """The cache anew, from nothing: an engine may empty it without a word."""
        if self._actor.life is not None:
            self._actor.life.announce()

    def _need(self, capability: Capability) -> None:
        engine = self._actor.engine
        if capability not in engine.capabilities:
            raise NotSupported(engine.name, capability)

    def _require_adapters(self) -> "Adapters":
        if self.adapters is None:
            raise NotSupported(self._actor.engine.name, "lora")
        return self.adapters

    def _undone_if_it_fails(self, before: WorkerState) -> Undo:
        return Undo(lambda: self._become(before))

    async def _empty(self, within_s: float | None) -> int:
        """Return once nothing runs. What does after `within_s` is aborted, and its edges move it: how many."""
        work = self._actor.work
        self.give_up.clear()
        if await over_within(work, within_s, self.give_up):
            return 0
        if self.give_up.is_set():
            raise Refusal(409, "given up: it was asked to resume or to stop")
        left = len(work)
        work.give_up()
        # KV that another worker fetches this moment can not be taken away from under it.
        limit_s = FETCH_S_MAX if work.handoffs else ABORT_S_MAX
        if not await over_within(work, limit_s, self.give_up):
            what = f"{len(work)} requests and {work.handoffs} hand-offs"
            raise EngineError(f"{what} do not end although they were given up")
        return left
