"""One epoch of a worker as the pool log sees it: the lease, the three writers, and what they announce.

The log learns of a life in one atomic append: the worker has joined, this is what its cache holds, these are its
requests. The same three things are told again whenever a reader asks for them (`resync`), because it lost some of
what was said before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog

from headwater.actors import lease
from headwater.actors.progress import Progress
from headwater.actors.world import World
from headwater.engines.engine import Engine, EngineInfo, KvEvent
from headwater.events.log import Log
from headwater.events.writer import Writer, stored
from headwater.schemas import subjects
from headwater.schemas.control import ControlReply, ControlRequest
from headwater.schemas.envelope import Event
from headwater.schemas.fleet import (
    LORA_ON_DEMAND,
    Role,
    WorkerChanged,
    WorkerControlled,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerState,
)
from headwater.schemas.kv import BlocksCleared, BlocksStored
from headwater.schemas.load import LoadReported, RequestsHeld

NO_PROGRESS = Progress()

OnStored = Callable[[int, Sequence[Event]], None]

_log = structlog.get_logger("headwater.worker")


class Standing(NamedTuple):
    """How a worker stands in the fleet, over all its lives: what an operator changes, and what it holds."""

    role: Role = "both"
    state: WorkerState = "ready"
    loras: tuple[str, ...] = ()
    instance: str = ""
    lora_on_demand: bool = False
    tier: str = ""
    taints: tuple[str, ...] = ()


class WorkerLife:
    """See the module.

    `standing` gives how the worker stands now.

    `active` names the requests that the engine has, `progress` those that were taken, that began to answer and
    that ended since it was last asked, and what was measured.
    """

    def __init__(
        self,
        world: World,
        held: lease.LeaseHandle,
        log: Log,
        name: str,
        pool: str,
        engine: Engine,
        info: EngineInfo,
        active: Callable[[], list[str]],
        progress: Callable[[], Progress],
        standing: Callable[[], Standing] = Standing,
    ) -> None:
        self.lease = held
        self._world = world
        self._log = log
        self._name = name
        self._engine = engine
        self._info = info
        self._active = active
        self._progress = progress
        self._standing = standing
        self._announcing = 0
        self._kv_lost = False

        def writer(kind: subjects.PoolKind, fence: str = "", on_stored: OnStored | None = None) -> Writer:
            subject = subjects.pool_subject(world.ns, pool, kind, name)
            return Writer(log, subject, name, held.epoch, world.clock, fence=fence, on_stored=on_stored)

        self.unwritten: deque[tuple[ControlRequest, ControlReply]] = deque()
        """Audits that the log is not known to have: if this life ends, the next one tells them."""
        self.fleet = writer("fleet", on_stored=self._on_fleet_stored)
        # What there is much of is streamed, and the fleet subject, written first in each life, fences it.
        self.kv = writer("kv", self.fleet.subject, self._on_stored)
        self.load = writer("load", self.fleet.subject)

    @property
    def epoch(self) -> int:
        """The epoch of this life."""
        return self.lease.epoch

    async def join(self) -> int:
        """Begin in the log, all at once; returns the position. Raises `WriterFenced`."""
        entries = [
            *await self.fleet.begin(self._joined(), self._stands()),
            *await self.kv.begin(BlocksCleared(), *self._held_blocks()),
            *await self.load.begin(RequestsHeld(tuple(self._active())), self.report()),
        ]
        return await stored(lambda: self._log.append(*entries), self._world.clock, self.fleet.subject)

    def report(self, progress: Progress = NO_PROGRESS) -> LoadReported:
        """The engine's load now, and which requests moved on."""
        return LoadReported(*self._engine.load(), **progress._asdict())

    def tell(self, events: list[KvEvent]) -> None:
        """Cache events for the log. Where its queue is full they are given up, and later all is told anew."""
        for event in events:
            self._kv_lost |= not self.kv.offer(event)
        if self._kv_lost and not self.kv.pending:
            self._kv_lost = False
            _log.warning("kv_announced_anew", worker=self._name, refused=self.kv.refused)
            self.announce()

    async def resync(self) -> None:
        """Tell everything anew. Asked again before the last telling is stored, it does nothing."""
        if self._announcing:
            return
        self.fleet.offer(self._joined())
        self.changed()
        await self.fleet.flush()
        self.announce()

    def announce(self) -> None:
        """Everything cached and every request, from nothing: ends any doubt about what came before."""
        events: list[Event] = [BlocksCleared(), *self._held_blocks()]
        for event in events:
            self._kv_lost |= not self.kv.offer(event)
        self._announcing = self.kv.pending
        # What ended is told as ended first: told behind it, it would be taken for a request yet to be decided.
        self.load.offer(self.report(self._progress()))
        self.load.offer(RequestsHeld(tuple(self._active())))

    def _held_blocks(self) -> list[BlocksStored]:
        """What the engine has cached; asleep it has nothing, whatever its books say."""
        held = self._engine.held_blocks()
        return [] if self._standing().state == "sleeping" else held

    def _on_stored(self, _: int, events: Sequence[Event]) -> None:
        """So much less stands between the last announcement's end and the log."""
        self._announcing = max(0, self._announcing - len(events))

    def changed(self) -> None:
        """Tell how the worker stands now."""
        self.fleet.offer(self._stands())

    def audit(self, request: ControlRequest, reply: ControlReply) -> None:
        """Put into the log what somebody had this worker do."""
        self.unwritten.append((request, reply))
        arguments = msgspec.json.encode(request.arguments)
        self.fleet.offer(
            WorkerControlled(
                self._name, self.epoch, request.command, arguments, request.by, reply.status, reply.detail
            )
        )

    def _on_fleet_stored(self, _: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, WorkerControlled):
                self.unwritten.popleft()

    def drain(self) -> None:
        """Tell that nothing new is taken."""
        self.fleet.offer(WorkerDraining(self._name, self.epoch))

    async def leave(self) -> None:
        """Tell that the worker is gone, write everything out and give the lease back."""
        self.fleet.offer(WorkerLeft(self._name, self.epoch, "stopped"))
        for writer in (self.kv, self.load, self.fleet):
            await writer.flush()
        await self.lease.release()

    async def fallen(self, reason: str) -> None:
        """Tell that the worker is gone because of `reason`. Its lease is another matter: see `actors.departure`."""
        self.fleet.offer(WorkerLeft(self._name, self.epoch, reason))
        await self.fleet.flush()

    def _joined(self) -> WorkerJoined:
        info = self._info
        standing = self._standing()
        capabilities: list[str] = sorted(self._engine.capabilities)
        if info.lora_slots and standing.lora_on_demand:
            capabilities.append(LORA_ON_DEMAND)
        return WorkerJoined(
            worker=self._name,
            epoch=self.epoch,
            model=info.model,
            engine=self._engine.name,
            role=standing.role,
            block_size=info.block_size,
            total_blocks=info.total_blocks,
            max_running=info.max_running,
            pairs_with=info.pairs_with,
            capabilities=tuple(capabilities),
            lora_slots=info.lora_slots,
            instance=standing.instance,
            tier=standing.tier,
            taints=standing.taints,
        )

    def _stands(self) -> WorkerChanged:
        standing = self._standing()
        return WorkerChanged(
            self._name, self.epoch, standing.state, standing.role, standing.loras, standing.taints
        )
