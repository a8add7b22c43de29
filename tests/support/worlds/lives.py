"""Actors in the test's own process, each under the supervisor as in production, and none waited for without end."""

import asyncio
from collections.abc import Callable, Sequence

from headwater.actors.runtime.actor import Actor, Unrecoverable, supervise
from headwater.schemas.clock import SystemClock

READY_S = 120.0
STOP_S = 60.0

Make = Callable[[], Actor]


class Lives:
    """Starts actors by kind and name, again where they end for a reason, and stops them."""

    def __init__(self) -> None:
        self._children: list[_Child] = []

    @staticmethod
    def once(actor: Actor) -> Make:
        """For an actor that has no second life in a test: its end is the test's."""
        left = [actor]

        def make() -> Actor:
            if not left:
                raise Unrecoverable(f"{actor.kind} {actor.name} ended, and this test has no other")
            return left.pop()

        return make

    async def start(self, kind: str, name: str, make: Make) -> None:
        """Start an actor, and wait until it is ready. Raises what its supervisor does if it never is."""
        child = _Child(kind, name, make)
        self._children.append(child)
        ready = asyncio.create_task(child.ready.wait())
        done, _ = await asyncio.wait(
            {ready, child.task}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
        )
        ready.cancel()
        if child.task in done:
            await child.task
        assert ready in done, f"{kind} {name} was not ready within {READY_S:g} s"

    async def stop(self, kinds: Sequence[str]) -> None:
        """End all, one kind after the other. Every one is ended, whatever went wrong with another; then it is raised."""
        problems: list[Exception] = []
        for child in sorted(self._children, key=lambda child: kinds.index(child.kind)):
            try:
                await child.stop()
            except Exception as error:
                problems.append(error)
        if problems:
            raise ExceptionGroup("actors did not end well", problems)


class _Child:
    """One actor's lives."""

    def __init__(self, kind: str, name: str, make: Make) -> None:
        self.kind = kind
        self.name = name
        self.ready = asyncio.Event()
        self._make = make
        self._actor: Actor | None = None
        self._stopping = False
        self.task = asyncio.create_task(supervise(f"{kind} {name}", self._life, SystemClock()))

    async def _life(self) -> str:
        if self._stopping:
            return ""
        self._actor = actor = self._make()
        telling = asyncio.create_task(self._tell(actor))
        try:
            reason = await actor.run()
        finally:
            telling.cancel()
            self._actor = None
        if actor.unexpected:
            raise Unrecoverable(f"a mistake of ours: {actor.unexpected}")
        if actor.unrecoverable:
            raise Unrecoverable(reason)
        return reason

    async def _tell(self, actor: Actor) -> None:
        await actor.ready.wait()
        self.ready.set()

    async def stop(self) -> None:
        """Ask its present life to end, and wait for it."""
        self._stopping = True
        if self._actor is not None:
            self._actor.stop()
        # Not awaited under a timeout, which would wait for as long as the cancelled task takes.
        await asyncio.wait({self.task}, timeout=STOP_S)
        if not self.task.done():
            self.task.cancel()
            raise TimeoutError(f"{self.kind} {self.name} did not end within {STOP_S:g} s")
        await self.task
