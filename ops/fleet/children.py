"""The processes of a fleet, each supervised, and stopped in stages.

A worker that fails again and again is started again as long as another worker runs steadily, or once the whole fleet was
ready: what clients send must not end it. Any other process that cannot be kept alive is the fleet's failure.
"""

import asyncio

import structlog

from headwater.actors.runtime.supervisor import RestartLimitReached, RestartPolicy, supervise
from headwater.ops.fleet.child import Child
from headwater.schemas.clock import Clock, SystemClock

POLICY = RestartPolicy()

_log = structlog.get_logger("headwater.up")


class ChildGroup:
    """See the module. `failure` is set to the reason once the fleet cannot continue; `was_ready` is set by its owner."""

    def __init__(self, clock: Clock | None = None, policy: RestartPolicy = POLICY) -> None:
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.was_ready = False
        self._clock = clock or SystemClock()
        self._policy = policy
        self._children: list[tuple[Child, asyncio.Task[None]]] = []
        self._workers: dict[str, Child] = {}
        """Those that are not given up."""

    def add(self, child: Child, *, is_worker: bool = False) -> None:
        """Start a process, and start it again whenever it fails."""
        if is_worker:
            self._workers[child.name] = child
        task = asyncio.create_task(self._watch(child, is_worker=is_worker), name=child.name)
        self._children.append((child, task))

    def pid(self, name: str) -> int:
        """Process id of a child, 0 while it is down."""
        return next(child.pid for child, _ in self._children if child.name == name)

    async def stop(self, *names: str) -> None:
        """End these processes at the same time; without names, all that are left."""
        group = [pair for pair in self._children if not names or pair[0].name in names]
        self._children = [pair for pair in self._children if pair not in group]
        await asyncio.gather(*(child.stop() for child, _ in group))
        for _, task in group:
            task.cancel()
        await asyncio.gather(*(task for _, task in group), return_exceptions=True)

    async def stop_workers(self) -> None:
        """End every process of a worker at the same time."""
        await self.stop(*(child.name for child, _ in self._children if child.name in self._workers))

    async def _watch(self, child: Child, *, is_worker: bool) -> None:
        def is_kept() -> bool:
            return is_worker and (self.was_ready or self._has_steady_worker())

        try:
            await supervise(child.name, child.run, self._clock, self._policy, is_kept=is_kept)
        except RestartLimitReached as error:
            self._workers.pop(child.name, None)
            if is_worker and self.was_ready and self._workers:
                _log.error("process_abandoned", child=child.name, reason=str(error))
            elif not self.failure.done():
                self.failure.set_result(str(error))

    def _has_steady_worker(self) -> bool:
        return any(child.runs_for_s >= self._policy.steady_s for child in self._workers.values())
