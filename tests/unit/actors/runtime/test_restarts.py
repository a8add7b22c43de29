"""The support for actors in a test's own process: they come back, mistakes are told, and nothing is waited for in vain."""

import asyncio
from typing import Any

import pytest

from headwater.actors.runtime.actor import Actor, RestartLimitReached
from headwater.actors.runtime.lease import LeaseLost
from tests.support.worlds import lives
from tests.support.worlds.clock import ManualClock
from tests.support.worlds.lives import Lives
from tests.support.worlds.memory import memory_world


class Part(Actor):
    """An actor that ends when `end` is set: with its error, if it has one."""

    kind = "router"

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(memory_world(ManualClock()), "r1")
        self.error = error
        self.end = asyncio.Event()
        self.stuck = False

    async def start(self) -> None:
        self.spawn(self._work(), "work")

    async def _work(self) -> None:
        await self.end.wait()
        if self.error is not None:
            raise self.error

    async def drain(self) -> None:
        if self.stuck:
            await asyncio.Event().wait()

    async def close(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {}


async def test_an_actor_that_lost_its_lease_comes_back() -> None:
    """As a new one."""
    first, second = Part(LeaseLost("it lapsed")), Part()
    waiting = [second, first]
    children = Lives()
    await children.start("router", "r1", waiting.pop)
    first.end.set()
    async with asyncio.timeout(30):
        await second.ready.wait()
    await children.stop(("router",))


@pytest.mark.parametrize("error", [ValueError("a mistake"), LeaseLost("it lapsed")])
async def test_an_end_that_may_not_be_is_told_at_the_stop(error: Exception) -> None:
    """A mistake of ours, and any end of an actor that has one life; others are stopped all the same."""
    broken, sound = Part(error), Part()
    children = Lives()
    await children.start("router", "r1", Lives.once(broken))
    await children.start("edge", "e", Lives.once(sound))
    broken.end.set()
    async with asyncio.timeout(30):
        while not _over(children, "r1"):
            await asyncio.sleep(0.01)
    with pytest.raises(ExceptionGroup) as caught:
        await children.stop(("router", "edge"))
    assert all(isinstance(one, RestartLimitReached) for one in caught.value.exceptions)
    assert sound.stopping


def _over(children: Lives, name: str) -> bool:
    return next(child for child in children._children if child.name == name).task.done()


async def test_one_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named instead."""
    monkeypatch.setattr(lives, "STOP_S", 0.05)
    part = Part()
    part.stuck = True
    children = Lives()
    await children.start("router", "r1", Lives.once(part))
    with pytest.raises(ExceptionGroup) as caught:
        await children.stop(("router",))
    assert "router r1 did not end" in str(caught.value.exceptions[0])
