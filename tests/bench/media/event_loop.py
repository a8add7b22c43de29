"""The media intake alone: how long the event loop stands still while large images are fetched and decoded.

A probe on the loop wakes every millisecond and notes how late it is, as a stream of tokens would be: first alone, for as long
as the images will take, then with images in flight. Images come as data URLs in a `str`, as a request has them.
"""

import asyncio
import base64
import time
from typing import Final, NamedTuple

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request import IntakeSettings, MediaSource
from headwater.ops.bench.report import Measure, cpu_seconds, percentile
from tests.bench.media.picture import large_png

ROUNDS: Final = 10
AT_ONCE: Final = 4
PROBE_S: Final = 0.001
GAP_MS_TARGET: Final = 20


class LoopProbe:
    """Wakes every `PROBE_S` seconds while it runs, and notes when, how late, and what the loop's thread has computed since.

    `at_s` are times of `time.perf_counter`, which all processes of a machine share.
    """

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.late_s: list[float] = []
        self.cpu_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopProbe":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            due_s, cpu_s = time.perf_counter() + PROBE_S, time.thread_time()
            await asyncio.sleep(PROBE_S)
            self.at_s.append(time.perf_counter())
            self.late_s.append(self.at_s[-1] - due_s)
            self.cpu_s.append(time.thread_time() - cpu_s)

    def longest_ms(self) -> float:
        """The longest that it was late: also because others used the processor."""
        return 1000 * max(self.late_s)

    def most_cpu_ms(self) -> float:
        """The most that the loop's thread computed between two wake-ups: what is its own part in being late."""
        return 1000 * max(self.cpu_s)


class MediaRun(NamedTuple):
    """Images in flight: how late the probe was alone and with them, how long each took, CPU seconds of their process."""

    alone: LoopProbe
    busy: LoopProbe
    item_s: list[float]
    process_cpu_s: float


async def measure() -> list[Measure]:
    """One image at a time, then several at once."""
    url = await asyncio.to_thread(_data_url)
    single, several = await run(url, at_once=1), await run(url, at_once=AT_ONCE)
    target = f"< {GAP_MS_TARGET}"
    return [
        Measure("intake: longest gap, no image", single.alone.longest_ms(), "ms"),
        Measure("intake: longest gap, one image in flight", single.busy.longest_ms(), "ms", target),
        Measure("intake: p99 gap, no image", 1000 * percentile(single.alone.late_s, 0.99), "ms"),
        Measure("intake: p99 gap, one image in flight", 1000 * percentile(single.busy.late_s, 0.99), "ms"),
        Measure(f"intake: longest gap, {AT_ONCE} images in flight", several.busy.longest_ms(), "ms", target),
        Measure("intake: most CPU of the loop at once, no image", single.alone.most_cpu_ms(), "ms"),
        Measure("intake: most CPU of the loop at once, one image in flight", single.busy.most_cpu_ms(), "ms"),
        Measure(
            f"intake: most CPU of the loop at once, {AT_ONCE} images in flight",
            several.busy.most_cpu_ms(),
            "ms",
        ),
        Measure("intake: time of an image p50", 1000 * percentile(single.item_s, 0.5), "ms"),
        Measure("intake: CPU of the process per image", 1000 * single.process_cpu_s / ROUNDS, "ms"),
    ]


async def run(url: str, *, at_once: int) -> MediaRun:
    """Measure with `at_once` images in flight."""
    intake = MediaIntake(settings=IntakeSettings(processes=at_once))
    source = MediaSource.from_url("image", url)
    item_s: list[float] = []

    async def decode(rounds: int) -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            item: MediaItem = await intake.fetch(source)
            item_s.append(time.perf_counter() - began)
            del item

    try:
        await asyncio.gather(*(decode(1) for _ in range(at_once)))
        item_s.clear()
        before = sum(cpu_seconds(pid) for pid in intake.pids)
        began = time.perf_counter()
        async with LoopProbe() as busy:
            await asyncio.gather(*(decode(max(1, ROUNDS // at_once)) for _ in range(at_once)))
        wall_s = time.perf_counter() - began
        used = sum(cpu_seconds(pid) for pid in intake.pids) - before
        async with LoopProbe() as alone:
            await asyncio.sleep(wall_s)
    finally:
        await intake.close()
    return MediaRun(alone, busy, item_s, used)


def _data_url() -> str:
    return f"data:image/png;base64,{base64.b64encode(large_png(0)).decode()}"
