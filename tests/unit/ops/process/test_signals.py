"""What every process does before its work begins."""

import asyncio
import gc
import os
import signal

import pytest

from headwater.ops.process import signals


def test_a_process_excludes_its_modules_from_collections() -> None:
    """A full collection over them takes a tenth of a second and more, in which no token is sent."""

    async def frozen(_: asyncio.Event) -> int:
        return gc.get_freeze_count()

    # Those of this process are excluded since it collected the tests.
    before, modules = gc.get_freeze_count(), [[0] for _ in range(10_000)]
    assert signals.run(frozen) - before >= len(modules)


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(None, 0, 0), (signal.SIGTERM, 0, 143), (signal.SIGINT, 0, 130), (signal.SIGTERM, 3, 3)],
)
def test_an_end_by_a_signal_differs_from_one_of_its_own_accord(
    number: signal.Signals | None, code: int, told: int
) -> None:
    """So that a worker that somebody killed is started again, and one that an operator stopped is not."""

    async def work(stop: asyncio.Event) -> int:
        if number is not None:
            os.kill(os.getpid(), number)
            await stop.wait()
        return code

    assert signals.run(work, reports_signal=True) == told
    assert signals.run(work) == code
