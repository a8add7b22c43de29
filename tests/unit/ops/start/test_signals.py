"""What every process does before its work begins."""

import asyncio
import gc
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headwater.ops.start import signals


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


DRAINS = """
import asyncio, sys
from headwater.ops.start import signals

async def work(stop):
    print("started", flush=True)
    await stop.wait()
    print("draining", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("drained", flush=True)
    return 0

sys.exit(signals.run(work, reports_signal=True))
"""
"""A process that drains until its standard input has a line."""

SUPERVISORS = [
    # systemd's default: each process of a group gets what its parent sends it as well.
    ([signal.SIGTERM, signal.SIGTERM], 143),
    ([signal.SIGTERM] * 5, 143),
    # A terminal that is closed, and the shell that passes it on.
    ([signal.SIGHUP, signal.SIGHUP], 129),
    ([signal.SIGHUP, signal.SIGTERM], 129),
    ([signal.SIGTERM, signal.SIGHUP], 143),
    # Ctrl-C reaches a whole process group; then the parent asks its children to end.
    ([signal.SIGINT, signal.SIGTERM], 130),
    ([signal.SIGTERM, signal.SIGINT], 143),
]


@asynccontextmanager
async def draining(
    *numbers: signal.Signals, ignored: tuple[signal.Signals, ...] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that got these signals, the first of which made it drain."""

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRAINS, stdin=PIPE, stdout=PIPE, preexec_fn=ignore
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"started\n"
            for at, number in enumerate(numbers):
                process.send_signal(number)
                if not at:
                    assert await process.stdout.readline() == b"draining\n"
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("numbers", "code"), SUPERVISORS)
async def test_a_drain_is_not_cut_by_what_a_supervisor_sends(
    numbers: list[signal.Signals], code: int
) -> None:
    """Requests in flight are finished; the exit code names the first signal."""
    async with draining(*numbers) as process:
        output, _ = await process.communicate(b"\n")
    assert output == b"drained\n"
    assert process.returncode == code


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
async def test_who_presses_ctrl_c_again_waits_no_longer(first: signal.Signals) -> None:
    """The second SIGINT ends a drain at once, whatever began it."""
    async with draining(first) as process:
        while process.returncode is None:
            # Two that come before the first is handled count as one.
            process.send_signal(signal.SIGINT)
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=0.05)
        assert process.returncode == 130
        assert process.stdout is not None
        assert await process.stdout.read() == b""


async def test_a_process_under_nohup_stays() -> None:
    """What ignored SIGHUP when it was started goes on ignoring it."""
    async with draining(ignored=(signal.SIGHUP,)) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        output, _ = await process.communicate(b"\n")
    # After SIGHUP alone it would have drained, and 129 would be its code.
    assert (output, process.returncode) == (b"draining\ndrained\n", 143)


ENDLESS = """
import asyncio, sys
from headwater.ops.start import signals

async def question():
    print("started", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("closed", flush=True)

sys.exit(signals.run_command(question))
"""
"""A command whose question nobody answers."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_command_that_drains_nothing_ends_with_the_first_signal(number: signal.Signals) -> None:
    """It closes its connections; 130 after Ctrl-C, and no traceback."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDLESS, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(60):
            assert process.stdout is not None
            assert await process.stdout.readline() == b"started\n"
            process.send_signal(number)
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (output, errors) == (b"closed\n", b"")
    assert process.returncode == 128 + number
