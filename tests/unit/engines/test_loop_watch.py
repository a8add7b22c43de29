"""Code that blocks an event loop is named, with its file, line and function."""

import asyncio
import time
from pathlib import Path

from structlog.testing import capture_logs

from headwater.engines.process import LoopWatch, folder_of
from tests.support.ports.waiting import eventually

HERE = f"{Path(__file__).parent}/"


def block(seconds: float) -> None:
    """A call as it should not be made."""
    time.sleep(seconds)


async def watched(folder: str, seconds: float) -> LoopWatch:
    """A watch of this loop, which is blocked for so long."""
    watch = LoopWatch("mine", folder, blocked_s=0.2)
    watch.start()
    await asyncio.sleep(0.05)
    block(seconds)
    # The thread hears of the loop again before it ends.
    await asyncio.sleep(0)
    watch.stop()
    await eventually(lambda: not watch._thread.is_alive())
    return watch


async def test_blocking_call_is_named_while_it_blocks_and_when_it_ends() -> None:
    with capture_logs() as lines:
        watch = await watched(HERE, 1.0)
    [first, last] = [line for line in lines if line["event"].startswith("event_loop")]
    assert (first["event"], last["event"]) == ("event_loop_blocked", "event_loop_released")
    for line in (first, last):
        assert (line["engine"], line["file"], line["function"]) == ("mine", __file__, "block")
        assert Path(__file__).read_text().splitlines()[line["line"] - 1].strip() == "time.sleep(seconds)"
    assert last["seconds"] > first["seconds"]
    assert [one.function for one in watch.blocks] == ["block"]


async def test_loop_that_is_busy_with_other_code_is_not_the_engines_fault() -> None:
    assert not (await watched("/elsewhere/", 0.6)).blocks


def test_code_of_a_class_is_in_its_folder() -> None:
    assert folder_of(LoopWatch).endswith("/engines/")
    assert folder_of(int) == ""


async def test_watch_ends_with_its_loop() -> None:
    watch = LoopWatch("mine", blocked_s=0.1)
    watch.start()
    await asyncio.sleep(0.1)
    assert watch._thread.is_alive()
    watch.stop()
    await eventually(lambda: not watch._thread.is_alive())
    assert not watch.blocks
