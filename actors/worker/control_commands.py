"""The control commands: their arguments, and what each does to a worker. States: ready, draining, paused, sleeping; see `WorkerStatus`.

                 ready      draining   paused     sleeping
    drain        draining   waits      409        409
    pause        paused     paused     paused     409
    sleep        sleeping   sleeping   409        sleeping (409 for another level)
    resume       ready      ready      ready      409: wake
    wake         409        409        409        ready

A command that fails leaves the state as it was.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from headwater.actors.runtime.ports import Ports
from headwater.actors.worker.health import EngineHealth
from headwater.actors.worker.incarnation import Incarnation
from headwater.actors.worker.inflight import Inflight, WorkerStatus
from headwater.actors.worker.lora import LoraManager
from headwater.engines.engine import (
    Engine,
    EngineDied,
    EngineError,
    EngineInfo,
    NotSupported,
    PauseMode,
    RequestRejected,
)
from headwater.schemas.control import Command, ControlReply
from headwater.schemas.events import Role, WorkerState
from headwater.schemas.tables import Capability


class WorkerContext(Protocol):
    """Implemented by `WorkerActor`."""

    name: str
    ports: Ports
    engine: Engine
    status: WorkerStatus
    inflight: Inflight
    health: EngineHealth
    lora: LoraManager | None
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


# Arguments, and errors that name the argument.

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
LoraName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TaintName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]

DRAIN_S = 30.0


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command without arguments."""


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests still in flight after `within_s` seconds are aborted and migrate."""

    level: Literal[1, 2] = 1
    within_s: Seconds = DRAIN_S


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mode wait: requests still in flight after `within_s` seconds are aborted and migrate."""

    mode: PauseMode = "wait"
    within_s: Seconds = DRAIN_S


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`within_s` as for sleep; None: no limit."""

    within_s: Seconds | None = None


class ToRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new role."""

    role: Role


class LoadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name that clients use, and the source to load the adapter from."""

    name: LoraName
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class UnloadLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapter to unload. With `forget`, all workers unload it and its card is deleted, so that no request loads it again."""

    name: LoraName
    forget: bool = False


class Taint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A taint: the router sends only requests that tolerate it."""

    name: TaintName


Arguments = NoArguments | Sleep | Pause | Drain | ToRole | LoadLora | UnloadLora | Taint

ARGUMENTS: dict[Command, type[Any]] = {
    "sleep": Sleep,
    "pause": Pause,
    "drain": Drain,
    "stop": Drain,
    "role": ToRole,
    "load-lora": LoadLora,
    "unload-lora": UnloadLora,
    "taint": Taint,
    "untaint": Taint,
}
"""The type of each command's arguments; commands that are not listed take none."""

_FIELD = re.compile(r"\$\.(\w+)")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class WrongArguments(ValueError):
    """The message names the command, the argument and the valid values."""


def parse(command: Command, arguments: dict[str, Any]) -> Arguments:
    """The command's arguments. Raises `WrongArguments`."""
    kind = ARGUMENTS.get(command, NoArguments)
    try:
        parsed: Arguments = msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise WrongArguments(f"{command}: {_describe(kind, str(error))}") from error
    return parsed


def _describe(kind: type[Any], error: str) -> str:
    takes = ", ".join(kind.__struct_fields__) or "none"
    if match := _UNKNOWN.search(error):
        return f"there is no argument {match[1]!r}; it takes {takes}"
    if match := _MISSING.search(error):
        return f"argument {match[1]!r} is missing"
    where = _FIELD.search(error)
    problem = error.partition(" - at ")[0]
    return f"argument {where[1]!r}: {problem}" if where else problem


def without_secrets(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the log: URLs without user, password and query (signed URLs carry their secret there)."""
    return {
        name: _without_secret(value) if isinstance(value, str) else value for name, value in arguments.items()
    }


def _without_secret(value: str) -> str:
    if "://" not in value:
        return value
    try:
        parts = urlsplit(value)
    except ValueError:
        return "(unreadable URL)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


# Commands.

ENGINE_S_MAX = 300.0
"""How long the engine may take for one operation: it may read its weights again from a slow disk."""

ABORT_S_MAX = 10.0
FETCH_S_MAX = 120.0


class CommandRefused(Exception):
    """The command is not possible in this state; the reply has this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Commands:
    """The commands of one worker. One command runs at a time, besides those that only read. `abandon_drain` ends a drain that waits."""

    def __init__(self, worker: WorkerContext) -> None:
        self.abandon_drain = asyncio.Event()
        self._worker = worker
        self._started_s = worker.ports.clock.monotonic_s()
        self._sleep_level = 0
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
            "taint": lambda taint: self._taint(taint, on=True),
            "untaint": lambda taint: self._taint(taint, on=False),
            "stop": self._stop,
        }

    async def execute(self, command: Command, arguments: Arguments) -> ControlReply:
        """Execute a command. Raises `CommandRefused`, `EngineError`, TimeoutError, and what an engine raises.

        Where that shows that the engine is dead, the worker ends after its reply.
        """
        try:
            return await self._all[command](arguments)
        except EngineDied as error:
            self._worker.status.note_engine_death(str(error))
            raise

    async def _status(self, _: Arguments) -> ControlReply:
        worker = self._worker
        status, load = worker.status, worker.engine.load()
        state = "stopping" if status.stopping else status.state
        return ControlReply(
            200,
            state,
            {
                "worker": worker.name,
                "pool": worker.pool,
                "engine": worker.engine.name,
                "model": worker.info.model,
                "state": state,
                "sleep_level": self._sleep_level,
                "role": status.role,
                "revision": status.revision,
                "tier": status.tier,
                "taints": list(status.taints),
                "epoch": worker.epoch,
                "load": load._asdict(),
                "requests": len(worker.inflight),
                "handoffs": worker.inflight.handoffs,
                "loras": list(status.loras),
                "capabilities": sorted(worker.engine.capabilities),
                "uptime_s": round(worker.ports.clock.monotonic_s() - self._started_s, 1),
            },
        )

    async def _sleep(self, command: Sleep) -> ControlReply:
        self._require("sleep")
        worker, before = self._worker, self._state
        if before == "sleeping":
            if command.level == self._sleep_level:
                return ControlReply(200, f"asleep at level {self._sleep_level} already")
            raise CommandRefused(409, f"asleep at level {self._sleep_level}: wake it first")
        if before == "paused":
            raise CommandRefused(409, "paused: resume it first")
        with self._restored_on_failure(before):
            self._set_state("draining")
            migrated = await self._drain_requests(command.within_s)
            async with worker.health.suspended(), self._awake_on_failure(), _engine_limit("sleep"):
                if "clear_kv" in worker.engine.capabilities:
                    # An engine may keep the hashes of blocks over a sleep: they would be hits on invalid data.
                    await worker.engine.clear_kv()
                await worker.engine.sleep(command.level)
            self._sleep_level = command.level
            self._set_state("sleeping")
        self._announce()
        return ControlReply(200, f"asleep at level {command.level}", {"migrated": migrated})

    async def _wake(self, _: Arguments) -> ControlReply:
        self._require("sleep")
        worker = self._worker
        if self._state != "sleeping":
            raise CommandRefused(409, f"it is {self._state}, not asleep")
        try:
            async with worker.health.suspended(), _engine_limit("wake"):
                await worker.engine.wake()
                await worker.health.canary(worker.info, ENGINE_S_MAX)
        except Exception as error:
            # It would sleep for good: only a new start brings it back.
            raise EngineDied(f"the engine did not wake: {error}") from error
        self._sleep_level = 0
        self._set_state("ready")
        self._announce()
        return ControlReply(200, "awake")

    async def _clear_kv(self, _: Arguments) -> ControlReply:
        self._require("clear_kv")
        if self._state == "sleeping":
            raise CommandRefused(409, "asleep: it has no cached blocks")
        async with _engine_limit("clear-kv"):
            await self._worker.engine.clear_kv()
        self._announce()
        return ControlReply(200, "cleared", {"held_requests": len(self._worker.inflight)})

    async def _pause(self, command: Pause) -> ControlReply:
        self._require("pause")
        worker, before = self._worker, self._state
        if before == "paused":
            return ControlReply(200, "paused already")
        if before == "sleeping":
            raise CommandRefused(409, "asleep: nothing to pause")
        migrated = 0
        with self._restored_on_failure(before):
            self._set_state("paused")
            if command.mode != "keep":
                migrated = await self._drain_requests(command.within_s if command.mode == "wait" else 0.0)
            async with worker.health.suspended(), _engine_limit("pause"):
                await worker.engine.pause(command.mode)
        kept_count = len(worker.inflight)
        return ControlReply(
            200, f"paused, {kept_count} requests kept", {"migrated": migrated, "kept": kept_count}
        )

    async def _resume(self, _: Arguments) -> ControlReply:
        if self._state == "sleeping":
            raise CommandRefused(409, "asleep: wake it")
        if self._state == "ready":
            return ControlReply(200, "ready already")
        if self._state == "paused":
            async with _engine_limit("resume"):
                await self._worker.engine.resume()
        self._set_state("ready")
        return ControlReply(200, "ready")

    async def _drain(self, command: Drain) -> ControlReply:
        if self._state in ("paused", "sleeping"):
            remedy = "resume" if self._state == "paused" else "wake"
            raise CommandRefused(409, f"{self._state}: {remedy} it first")
        self._set_state("draining")
        migrated = await self._drain_requests(command.within_s)
        return ControlReply(200, "drained: it accepts no requests until resumed", {"migrated": migrated})

    async def _profile(self, *, on: bool) -> ControlReply:
        self._require("profile")
        async with _engine_limit("profile"):
            await self._worker.engine.profile(on=on)
        return ControlReply(
            200, "profiling" if on else "the profile is written where the engine's settings say"
        )

    async def _role(self, command: ToRole) -> ControlReply:
        status, inflight = self._worker.status, self._worker.inflight
        if command.role == status.role:
            return ControlReply(200, f"role {command.role} already")
        if "encode" in (command.role, status.role):
            raise CommandRefused(
                409, f"its engine was started as {status.role}: start a worker with --role {command.role}"
            )
        if command.role != "both":
            self._require("handoff")
        if "split_only" in self._worker.engine.capabilities:
            raise CommandRefused(
                409,
                f"its engine was started to {status.role} only: start a worker with --role {command.role}",
            )
        if len(inflight) or inflight.handoffs:
            raise CommandRefused(
                409,
                f"{len(inflight)} requests are in flight, {inflight.handoffs} hand-offs are kept: drain it first",
            )
        # No await between the check and this, so no request can arrive in between.
        status.set_role(command.role)
        then = "" if self._state == "ready" else f"; it is {self._state}"
        return ControlReply(200, f"role {command.role}{then}", {"state": self._state})

    async def _load_lora(self, command: LoadLora) -> ControlReply:
        await self._require_lora().load(command.name, command.source)
        return ControlReply(200, f"loaded {command.name}", {"loras": list(self._worker.status.loras)})

    async def _unload_lora(self, command: UnloadLora) -> ControlReply:
        await self._require_lora().unload(command.name, forget=command.forget)
        return ControlReply(200, f"unloaded {command.name}", {"loras": list(self._worker.status.loras)})

    async def _list_loras(self, _: Arguments) -> ControlReply:
        loras = await self._require_lora().list()
        return ControlReply(200, f"{len(loras)} LoRA adapters", {"loras": loras})

    async def _taint(self, command: Taint, *, on: bool) -> ControlReply:
        taints = set(self._worker.status.taints)
        if (command.name in taints) == on:
            return ControlReply(200, f"{'tainted' if on else 'not tainted'} {command.name} already")
        taints ^= {command.name}
        self._worker.status.set_taints(tuple(sorted(taints)))
        done = "tainted" if on else "no longer tainted"
        return ControlReply(200, f"{done} {command.name}", {"taints": sorted(taints)})

    async def _stop(self, command: Drain) -> ControlReply:
        """The handler stops the actor after it has sent this reply."""
        if command.within_s is not None:
            self._worker.drain_s = command.within_s
        return ControlReply(200, f"stopping: requests in flight have {self._worker.drain_s:g} s to finish")

    @property
    def _state(self) -> WorkerState:
        return self._worker.status.state

    def _set_state(self, state: WorkerState) -> None:
        if state != self._state:
            self._worker.status.set_state(state)
            self._worker.inflight.timer.mark_doubtful()

    def _announce(self) -> None:
        """Publish the cache from scratch: an engine may clear it without an event."""
        if self._worker.incarnation is not None:
            self._worker.incarnation.announce()

    def _require(self, capability: Capability) -> None:
        engine = self._worker.engine
        if capability not in engine.capabilities:
            raise NotSupported(engine.name, capability)

    def _require_lora(self) -> LoraManager:
        if self._worker.lora is None:
            raise NotSupported(self._worker.engine.name, "lora")
        return self._worker.lora

    @contextmanager
    def _restored_on_failure(self, before: WorkerState) -> Iterator[None]:
        try:
            yield
        except EngineDied:
            # The worker ends.
            raise
        except BaseException:
            self._set_state(before)
            raise

    @asynccontextmanager
    async def _awake_on_failure(self) -> AsyncIterator[None]:
        """Around a call that puts the engine to sleep: one that failed must have left it awake. Raises `EngineDied`."""
        try:
            yield
        except EngineDied:
            raise
        except Exception as error:
            try:
                await self._worker.health.canary(self._worker.info, ENGINE_S_MAX)
            except RequestRejected as rejected:
                raise EngineDied(f"the engine is neither asleep nor awake: {rejected}") from error
            raise

    async def _drain_requests(self, within_s: float | None) -> int:
        """Return once nothing is in flight. What is after `within_s` is aborted and migrates: returns how many."""
        inflight = self._worker.inflight
        self.abandon_drain.clear()
        if await inflight.drained_within(within_s, self.abandon_drain):
            return 0
        if self.abandon_drain.is_set():
            raise CommandRefused(409, "abandoned: a resume or stop command arrived")
        aborted_count = len(inflight)
        self._worker.abort_all()
        # KV that another worker is fetching cannot be released before it is done.
        limit_s = FETCH_S_MAX if inflight.handoffs else ABORT_S_MAX
        if not await inflight.drained_within(limit_s, self.abandon_drain):
            unfinished = f"{len(inflight)} requests and {inflight.handoffs} hand-offs"
            raise EngineError(f"{unfinished} have not ended although they were aborted")
        return aborted_count


@asynccontextmanager
async def _engine_limit(operation: str) -> AsyncIterator[None]:
    """Limit an operation of the engine to `ENGINE_S_MAX`. Raises TimeoutError that names the operation."""
    try:
        async with asyncio.timeout(ENGINE_S_MAX):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"the engine did not {operation} within {ENGINE_S_MAX:g} s") from error
