"""Places of processes: two lines, each shared by tenants, with a bounded wait."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from headwater.actors.media.intake import Line, ProcessPlaces
from headwater.actors.media.request import MediaCode, MediaError

LONG_S = 60.0


class Items:
    """Items of tenants that take places, and the order in which they got them."""

    def __init__(self, places: ProcessPlaces) -> None:
        self._places = places
        self.got: list[str] = []
        self.failed: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, line: Line = "decode") -> None:
        """An item, such as `a1` of the tenant a, takes a place or waits for one."""
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._stay(name, line))
        await self._settle()

    async def _stay(self, name: str, line: Line) -> None:
        try:
            async with self._places.place(line, name[0]):
                self.got.append(name)
                await self._leave[name].wait()
        except MediaError as error:
            self.failed.append(name if error.code == MediaCode.BUSY else str(error))

    async def go(self, name: str, then_cancel: str = "") -> None:
        """It gives its place back; then another one is cancelled before it runs with what it got."""
        self._leave[name].set()
        await self._tasks[name]
        if then_cancel:
            self._tasks[then_cancel].cancel()
        await self._settle()

    async def cancel(self, name: str) -> None:
        """Its client disconnects."""
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await self._settle()

    @staticmethod
    async def _settle() -> None:
        """Items that got a place, or lost theirs, have noticed."""
        for _ in range(4):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """All leave."""
        for event in self._leave.values():
            event.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def test_slow_servers_of_one_tenant_take_no_place_from_items_sent_along() -> None:
    """Neither a place nor room in the line: the lines have bounds of their own."""
    items = Items(ProcessPlaces(2, 3, LONG_S))
    for number in range(6):
        await items.come(f"a{number}", "fetch")
    assert items.got == ["a0"]
    assert items.failed == ["a4", "a5"]
    await items.come("b0")
    assert items.got == ["a0", "b0"]
    for number in range(1, 4):
        await items.come(f"b{number}")
    assert items.failed == ["a4", "a5"]
    await items.end()
    assert len(items.got) == 8


async def test_tenants_take_turns() -> None:
    """One that sent many items waits for its own."""
    items = Items(ProcessPlaces(1, 10, LONG_S))
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
        await items.come(name)
    for name in ("a0", "a1", "b0", "c0", "a2", "b1"):
        await items.go(name)
    assert items.got == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]
    await items.end()


async def test_a_full_line_is_shared() -> None:
    """The newest item of the tenant with most of them gives way to another's, down to equal shares."""
    items = Items(ProcessPlaces(1, 4, LONG_S))
    await items.come("x0")
    for number in range(5):
        await items.come(f"a{number}")
    assert items.failed == ["a4"]
    await items.come("b0")
    assert items.failed == ["a4", "a3"]
    await items.come("b1")
    assert items.failed == ["a4", "a3", "a2"]
    await items.come("b2")
    await items.come("a5")
    assert items.failed == ["a4", "a3", "a2", "b2", "a5"]
    await items.end()


async def test_lines_take_turns() -> None:
    """Neither keeps the other waiting for ever."""
    items = Items(ProcessPlaces(1, 10, LONG_S))
    await items.come("x0")
    for number in range(2):
        await items.come(f"a{number}", "fetch")
        await items.come(f"b{number}")
    for name in ("x0", "a0", "b0", "a1"):
        await items.go(name)
    assert items.got == ["x0", "a0", "b0", "a1", "b1"]
    await items.end()


async def test_a_wait_ends() -> None:
    """With an error that says so; what waited longer is not served first afterwards."""
    places = ProcessPlaces(1, 10, 0.05)
    async with places.place("decode", "a"):
        with pytest.raises(MediaError, match="waited too long") as caught:
            async with places.place("decode", "a"):
                pytest.fail("there is no place")
        assert caught.value.code == MediaCode.BUSY
    async with places.place("decode", "b"):
        pass


async def test_what_is_cancelled_gives_its_place_back() -> None:
    """While it waits, and at the moment at which it gets a place."""
    items = Items(ProcessPlaces(1, 10, LONG_S))
    for name in ("a0", "a1", "a2"):
        await items.come(name)
    await items.cancel("a1")
    await items.go("a0", then_cancel="a2")
    await items.come("b0")
    assert items.got[-1] == "b0"
    await items.end()


async def test_no_place_is_lost() -> None:
    """After many came, left, and were cancelled, all places are free."""
    places = ProcessPlaces(3, 8, LONG_S)
    items = Items(places)
    for number in range(60):
        name = f"{'abc'[number % 3]}{number}"
        await items.come(name, "fetch" if number % 2 else "decode")
        if number % 4 == 3:
            await items.cancel(f"{'abc'[(number - 2) % 3]}{number - 2}")
    await items.end()
    async with AsyncExitStack() as held, asyncio.timeout(5):
        for line in ("decode", "fetch", "fetch"):
            await held.enter_async_context(places.place(line, "z"))
