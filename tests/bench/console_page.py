"""The console's page in Chromium: `python -m tests.bench.console_page CONSOLE [--hours H]`, for a console that runs, such as that of `headwater up`.

Shows each view in a wide and a narrow window and prints what it costs the browser: time until it is shown, the longest task, elements, and
by how much it is too wide. With `--hours` it then uses the page as a person would in so many hours, in fewer minutes (views, steps and drags
of the slider, following), and prints the memory of the page after forced collections of garbage.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from playwright.async_api import CDPSession

from headwater.ops.bench.report import machine
from tests.console.browser import NARROW, VIEWS, WIDE, Console, ConsolePage, chromium

WATCH_TASKS: Final = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
}).observe({ entryTypes: ['longtask'] });
"""

SETTLED: Final = (
    "() => Boolean(document.querySelector('h1')) && !document.querySelector('main .skeleton, main.busy')"
)
SLIDER: Final = """() => {
  const box = document.getElementById('position-slider').getBoundingClientRect();
  return [box.x, box.y + box.height / 2, box.width];
}"""

WINDOWS: Final = (WIDE, NARROW)
MOVES_AN_HOUR: Final = 360
"""What a person does in an hour of work: one thing every ten seconds."""

STEPS: Final = 12
"""Positions of the slider that each move drags over."""

MIB: Final = 1024 * 1024


class Shown(NamedTuple):
    """What a view cost: milliseconds until it was shown and of its longest task, its elements, and pixels too many."""

    shown_ms: float
    task_ms: float
    elements: int
    overflow: int


async def show(page: ConsolePage, view: str, **parameters: Any) -> Shown:
    """Turn to a view, and let it be for a while."""
    await page.page.evaluate("() => { window.longest = 0; }")
    began = time.perf_counter()
    await page.turn_to(view, **parameters)
    shown_ms = 1000 * (time.perf_counter() - began)
    await asyncio.sleep(1.5)
    longest = await page.page.evaluate("() => window.longest")
    elements = await page.page.evaluate("() => document.querySelectorAll('*').length")
    return Shown(shown_ms, longest, elements, await page.overflow())


async def every_view(console: Console, pictures: Path | None) -> None:
    """Print what each view costs at the newest position, and while it follows."""
    at = (await console.ask("log"))["last"]
    request = (await console.ask("requests", limit=1, at=at, window_s=86_400))["requests"]
    views: list[tuple[str, dict[str, str]]] = [(name, {}) for name in VIEWS]
    views += [("request", {"id": request[0]["id"]})] if request else []
    print(f"{'view':<12} {'window':>7} {'shown':>9} {'longest task':>13} {'elements':>9} {'too wide':>9}")
    for size in WINDOWS:
        async with console.page(size) as page:
            await page.page.add_init_script(WATCH_TASKS)
            await page.open("replicas", pool=console.pool, at=at)
            for view, parameters in views:
                found = await show(page, view, pool=console.pool, at=at, **parameters)
                print(
                    f"{view:<12} {size['width']:>7} {found.shown_ms:>6.0f} ms {found.task_ms:>10.0f} ms {found.elements:>9,} "
                    f"{found.overflow:>6} px",
                    flush=True,
                )
                if pictures is not None:
                    await page.page.screenshot(path=pictures / f"{view}-{size['width']}.png")


class Memory(NamedTuple):
    """The page's JavaScript heap after a collection, in bytes, its nodes of the document, and its listeners."""

    heap: int
    nodes: int
    listeners: int


async def memory_of(session: CDPSession) -> Memory:
    """Collect garbage and measure."""
    for _ in range(2):
        await session.send("HeapProfiler.collectGarbage")
    usage = await session.send("Runtime.getHeapUsage")
    counts = await session.send("Memory.getDOMCounters")
    return Memory(int(usage["usedSize"]), counts["nodes"], counts["jsEventListeners"])


class Hand:
    """Uses a page through scripts and raw input only: Playwright's locators keep the elements that they found, as if the page leaked them."""

    def __init__(self, page: ConsolePage, pool: str, requests: list[str]) -> None:
        self._page = page.page
        self._pool = pool
        self._requests = requests

    async def turn_to(self, view: str, **parameters: Any) -> None:
        """Go to a view, and wait for its content."""
        query = httpx.QueryParams({"pool": self._pool, **parameters})
        await self._page.evaluate("address => { location.hash = address; }", f"#/{view}?{query}")
        await self._settle()

    async def _settle(self) -> None:
        """Wait until nothing is on its way."""
        for _ in range(200):
            await asyncio.sleep(0.05)
            if await self._page.evaluate(SETTLED):
                return
        raise TimeoutError("the page is still busy after ten seconds")

    async def move(self, number: int) -> None:
        """One thing that a person does: a view, a drag of the slider and a step, or following."""
        names = [*VIEWS, "request"]
        view = names[number % len(names)]
        known = self._requests if view == "request" else []
        await self.turn_to(view, **({"id": known[number % len(known)]} if known else {}))
        if number % 3:
            left, y, width = await self._page.evaluate(SLIDER)
            await self._page.mouse.move(left + width - 10, y)
            await self._page.mouse.down()
            for step in range(STEPS):
                await self._page.mouse.move(left + width * (0.95 - 0.8 * (step * number % STEPS) / STEPS), y)
            await self._page.mouse.up()
            await self._page.keyboard.press("d" if number % 2 else "]")
            await self._settle()
            await self._page.keyboard.press("l")
        await self._settle()


async def use(console: Console, hours: float, points: int = 8) -> None:
    """Print the memory at the start and after equal parts of the simulated time."""
    requests = [one["id"] for one in (await console.ask("requests", limit=50, window_s=86_400))["requests"]]
    total = int(hours * MOVES_AN_HOUR)
    async with console.page(WIDE) as page:
        await page.open("overview", pool=console.pool)
        session = await page.page.context.new_cdp_session(page.page)
        hand = Hand(page, console.pool, requests)
        # What is loaded once, and code that is compiled on its first use, is no growth.
        for number in range(3 * (len(VIEWS) + 1)):
            await hand.move(number)
        print(f"{'time used':>12} {'heap':>10} {'nodes':>8} {'listeners':>10}")
        began = time.monotonic()
        for done in range(total + 1):
            if done % max(1, total // points) == 0 or done == total:
                await hand.turn_to("overview")
                found = await memory_of(session)
                print(
                    f"{60 * done / MOVES_AN_HOUR:>8.0f} min {found.heap / MIB:>6.2f} MiB {found.nodes:>8,} {found.listeners:>10,}",
                    flush=True,
                )
            if done < total:
                await hand.move(done)
        print(
            f"{total} moves, two of three with a drag over {STEPS} positions, in {time.monotonic() - began:.0f} s"
        )
        # A request may have been dropped, or not be accepted yet where the slider is.
        page.expected.append("404")


async def main(url: str, hours: float, pictures: Path | None) -> int:
    """Measure and print."""
    print(machine())
    async with chromium() as browser:
        print(f"Chromium {browser.version}")
        probe = Console(url, browser, "")
        pools = (await probe.ask("pools"))["pools"]
        await probe.close()
        console = Console(url, browser, pools[0]["pool"])
        log = await console.ask("log")
        fleet = await console.ask("fleet")
        print(f"pool {console.pool}: {log['last']:,} messages, {fleet['totals']['workers']:,} workers")
        if hours:
            await use(console, hours)
        else:
            await every_view(console, pictures)
        await console.close()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("console", help="its address, such as http://127.0.0.1:8001")
    parser.add_argument("--hours", type=float, default=0.0, help="hours of simulated use")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the views")
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.console, given.hours, given.pictures)))
