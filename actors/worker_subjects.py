"""Where one life of a worker listens: its own subjects by epoch, and those of the worker, whoever it is now."""

from collections.abc import Iterable

from headwater.actors.bus_port import Handler, Subscription
from headwater.actors.world import World
from headwater.schemas import subjects
from headwater.schemas.subjects import EngineVerb


class WorkerSubjects:
    """Subscriptions of a worker called `name`. A verb may have several handlers; each gets every message."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._open: list[Subscription] = []

    def __len__(self) -> int:
        """Subscriptions that are open now."""
        return len(self._open)

    async def open(
        self, epoch: int, verbs: Iterable[tuple[EngineVerb, Handler]], *, resync: Handler, control: Handler
    ) -> None:
        """Listen from now on. `verbs` are for this epoch only."""
        ns, name = self._world.ns, self._name
        wanted = [(subjects.engine(ns, name, epoch, verb), handler) for verb, handler in verbs]
        wanted += [(subjects.resync(ns, name), resync), (subjects.control(ns, name), control)]
        for subject, handler in wanted:
            self._open.append(await self._world.bus.subscribe(subject, handler))

    async def close(self) -> None:
        """Listen no more. Twice is fine."""
        for subscription in self._open:
            await subscription.unsubscribe()
        self._open.clear()
