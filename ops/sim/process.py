"""One simulated process: a group of tasks that can be suspended, killed, and disconnected from the network."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headwater.actors.runtime.tasks import cancel_all
from headwater.ops.sim.loop import Group, VirtualLoop

WALL_NS = 1_800_000_000_000_000_000
"""Wall-clock time at the start of a run."""


class Process:
    """A process of the simulated fleet. Its ports check whether it is alive and connected."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.alive = True
        self.connected = True
        self.wall_offset_s = 0.0
        self.slow_reader_s = 0.0
        self.ids = 0
        self.group = Group(name)
        self._loop = loop
        self._reconnected = asyncio.Event()
        self._on_kill: list[Callable[[], None]] = []

    def start(self, work: Awaitable[Any], name: str) -> "asyncio.Task[Any]":
        """Run `work` as this process."""

        async def main() -> Any:
            return await work

        return self._loop.start(self.group, main(), f"{self.name}: {name}")

    def on_kill(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the process is killed, in place of the kernel."""
        self._on_kill.append(callback)

    def die(self) -> None:
        """From now on its actions have no effect on other processes."""
        self.alive = False
        for callback in self._on_kill:
            callback()
        self._on_kill.clear()

    async def kill(self) -> list[str]:
        """SIGKILL. Returns tasks that did not end.

        The tasks are cancelled, which runs their clean-up against dead ports.
        """
        self.die()
        self.heal()
        self.group.resume(self._loop)
        try:
            async with asyncio.timeout(10.0):
                await cancel_all(self.group.tasks)
        except TimeoutError:
            return [task.get_name() for task in self.group.tasks]
        return []

    def cut(self) -> None:
        """Disconnect from the network."""
        self.connected = False
        self._reconnected.clear()

    def heal(self) -> None:
        """Reconnect to the network."""
        self.connected = True
        self._reconnected.set()

    async def reconnected(self) -> None:
        """Return once connected."""
        while not self.connected:
            await self._reconnected.wait()

    def new_id(self) -> str:
        """A unique id."""
        self.ids += 1
        return f"{self.name}n{self.ids}"

    # The clock of the actors.

    def wall_ns(self) -> int:
        """See `Clock.wall_ns`."""
        return WALL_NS + round((self._loop.time() + self.wall_offset_s) * 1e9)

    def monotonic_s(self) -> float:
        """See `Clock.monotonic_s`."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)
