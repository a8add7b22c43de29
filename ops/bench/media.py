"""`headwater bench media`: how long the event loop stands still while large images are fetched and decoded.

A probe on the loop wakes every millisecond and notes how late it is, as a stream of tokens would be: first alone, for as long
as the images will take, then with images in flight. Images come as data URLs in a `str`, as a request has them.
"""

import asyncio
import base64
import io
import time
from typing import Final, NamedTuple

import numpy as np

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import MediaItem
from headwater.actors.media.request.settings import IntakeSettings
from headwater.actors.media.request.source import MediaSource
from headwater.ops.bench.report import Measure, Report, cpu_seconds, percentile
from headwater.ops.config.errors import ConfigError

SIDE: Final = 2_600
"""Pixels; without compression three bytes each make a PNG of 20 MB."""

ROUNDS: Final = 10
AT_ONCE: Final = 4
PROBE_S: Final = 0.001
GAP_MS_TARGET: Final = 20


class LoopProbe:
    """Wakes every `PROBE_S` seconds while it runs, and notes how late, and what the loop's thread has computed since."""

    def __init__(self) -> None:
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
            self.late_s.append(time.perf_counter() - due_s)
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


async def bench() -> Report:
    """One image at a time, then several at once."""
    url, size = await asyncio.to_thread(_image)
    single, several = await run(url, at_once=1), await run(url, at_once=AT_ONCE)
    target = f"< {GAP_MS_TARGET}"
    return Report(
        "media",
        {
            "image": f"PNG, {SIDE} x {SIDE}, {size / 1e6:.1f} MB, as a data URL",
            "images": f"{ROUNDS} one at a time, {ROUNDS} {AT_ONCE} at a time",
            "probe": f"every {PROBE_S * 1000:g} ms",
        },
        [
            Measure("longest gap, no image", single.alone.longest_ms(), "ms"),
            Measure("longest gap, one image in flight", single.busy.longest_ms(), "ms", target),
            Measure("p99 gap, no image", 1000 * percentile(single.alone.late_s, 0.99), "ms"),
            Measure("p99 gap, one image in flight", 1000 * percentile(single.busy.late_s, 0.99), "ms"),
            Measure(f"longest gap, {AT_ONCE} images in flight", several.busy.longest_ms(), "ms", target),
            Measure("most CPU of the loop at once, no image", single.alone.most_cpu_ms(), "ms"),
            Measure("most CPU of the loop at once, one image in flight", single.busy.most_cpu_ms(), "ms"),
            Measure(
                f"most CPU of the loop at once, {AT_ONCE} images in flight", several.busy.most_cpu_ms(), "ms"
            ),
            Measure("time of an image p50", 1000 * percentile(single.item_s, 0.5), "ms"),
            Measure("CPU of the process per image", 1000 * single.process_cpu_s / ROUNDS, "ms"),
        ],
    )


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


def _image() -> tuple[str, int]:
    """A PNG that does not compress, as a data URL, and its size in bytes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("bench media needs pip install 'headwater[media]'") from error
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    data = out.getvalue()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}", len(data)
