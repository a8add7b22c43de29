"""Killing a simulated process at each of its steps, one run per step."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NamedTuple, TypeVar

from headwater.actors.runtime.ports import Ports
from headwater.ops.sim import loop
from headwater.ops.sim.fleet import SimFleet
from headwater.ops.sim.loop import VirtualLoop
from headwater.ops.sim.network import Process

T = TypeVar("T")
STEPS_MAX = 5_000


class Scene(NamedTuple):
    """A store, and processes that come to it one after the other."""

    clock: VirtualLoop
    fleet: SimFleet

    def process(self, name: str) -> tuple[Process, Ports]:
        """A new process with ports of its own."""
        process = self.fleet.processes[name] = Process(name, self.clock)
        return process, self.fleet.ports(process, name)


def every_crash(
    work: Callable[[Ports], Awaitable[object]], after: Callable[[Scene, bool], Awaitable[T]]
) -> Iterator[T]:
    """Run `work` as a process that dies before its n-th step, for every n, then `after(scene, it died)`.

    There is one run for each place where the event loop could have been interrupted, and a last one in which the
    process lives to its end.
    """
    for number in range(1, STEPS_MAX):
        result, died = loop.run(_run(work, after, number))
        yield result
        if not died:
            assert number > 5, "the work has hardly a step to die at"
            return
    raise AssertionError(f"the work has more than {STEPS_MAX} steps")


def _run(
    work: Callable[[Ports], Awaitable[object]], after: Callable[[Scene, bool], Awaitable[T]], at: int
) -> Callable[[VirtualLoop], Coroutine[Any, Any, tuple[T, bool]]]:
    async def run(clock: VirtualLoop) -> tuple[T, bool]:
        scene = Scene(clock, SimFleet(clock, random.Random(1), lambda *_: None, [], [], []))
        process, world = scene.process("first")
        died = asyncio.Event()
        steps = 0

        def on_step() -> None:
            nonlocal steps
            steps += 1
            if steps == at:
                process.die()
                died.set()

        process.group.on_step = on_step
        task = process.start(work(world), "work")
        waiting = {task, clock.create_task(died.wait())}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        process.group.on_step = None
        assert await process.kill() == []
        if not died.is_set():
            task.result()
        return await after(scene, died.is_set()), died.is_set()

    return run
