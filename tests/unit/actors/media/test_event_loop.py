"""The event loop while an image of 20 MB is in flight."""

import asyncio
import gc
import os
import threading
import time
from itertools import pairwise
from mmap import mmap

import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.item import SharedValues
from headwater.actors.media.request import IntakeSettings, MediaLimits, MediaSource
from tests.bench.media.event_loop import LoopProbe
from tests.support.media.images import data_url, encoded, noise, picture

CPU_MS_MAX = 5.0
"""Copying the image once takes the loop longer."""

COPY_SHARE_MAX = 0.8
"""On a machine that is so busy that everything takes longer: of what a copy takes there."""


def copy_ms(data: bytes) -> float:
    """Processor time of copying the image to memory that is new to the process."""
    copies, times_s = [], [time.thread_time()]
    for _ in range(3):
        copies.append(bytearray(data))
        times_s.append(time.thread_time())
    return 1_000 * min(later - earlier for earlier, later in pairwise(times_s))


async def test_the_loop_does_not_copy_an_image() -> None:
    """What its thread computes between two wake-ups, which depends little on what else this machine does."""
    data = encoded(noise(2600), "PNG", compress_level=0)
    assert len(data) > 20_000_000
    source = MediaSource.from_url("image", data_url(data))
    intake = MediaIntake(settings=IntakeSettings(processes=1), limits=MediaLimits())
    gc.disable()
    try:
        async with LoopProbe() as probe:
            item = await intake.fetch(source)
            assert item.shape == (2600, 2600, 3)
            del item
            await intake.fetch(MediaSource.from_bytes("image", data))
        assert probe.most_cpu_ms() < max(CPU_MS_MAX, COPY_SHARE_MAX * copy_ms(data))
    finally:
        gc.enable()
        await intake.close()


async def test_threads_free_the_memory_of_items(strict: MediaIntake, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the file, and that of the pixels once nothing refers to them: pages take milliseconds to free."""
    by: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        by.append((what, threading.current_thread() is threading.main_thread()))

    def close(descriptor: int, close: object = os.close) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd"):
            note("close")
        assert callable(close)
        close(descriptor)

    def unmap(values: mmap) -> None:
        note("unmap")
        mmap.close(values)

    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(SharedValues, "close", unmap)
    before = mapped()
    item = await strict.fetch(MediaSource.from_bytes("image", encoded(picture(), "PNG")))
    (own,) = mapped() - before
    part = item.array()[1]
    del item
    gc.collect()
    assert own in mapped()
    assert part[0, 0] == 18 * 7 % 256
    del part
    async with asyncio.timeout(20):
        while own in mapped():
            await asyncio.sleep(0.01)
    # Other tests' items may end here too.
    assert set(by) == {("close", False), ("unmap", False)}
    assert len([what for what, _ in by if what == "close"]) >= 2


def mapped() -> set[str]:
    """Items mapped in this process: the inodes of their memory."""
    with open("/proc/self/maps") as file:
        return {line.split()[4] for line in file if "memfd:decoded" in line}
