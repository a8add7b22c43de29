"""A signal interrupts what blocks the main thread, with the processes that it started."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE

import pytest

from headwater.engines.process import interruptible
from tests.support.processes.fleet import command_line

PROGRAM = """
import asyncio, subprocess, sys, threading, time
from headwater.engines import process as interruption
from headwater.engines.process import EngineInterrupted
from headwater.ops.start import signals

interruption.CLEAN_UP_S = 0.3

def blocks():
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, flush=True)
    time.sleep(1000)

def drops():
    try:
        blocks()
    except BaseException:
        pass

def drops_and_blocks():
    drops()
    time.sleep(1000)

def fails():
    try:
        blocks()
    finally:
        raise RuntimeError("the library's own")

async def work(stop):
    try:
        with interruption.interruptible():
            globals()[sys.argv[1]]()
    except EngineInterrupted:
        print("interrupted", flush=True)
    await asyncio.wait_for(stop.wait(), 5)
    return 0

sys.exit(signals.run(work, reports_signal=True))
"""


@pytest.mark.parametrize(
    ("library", "number"),
    [
        ("blocks", signal.SIGINT),
        ("blocks", signal.SIGTERM),
        ("drops", signal.SIGHUP),
        ("fails", signal.SIGTERM),
        ("drops_and_blocks", signal.SIGTERM),
    ],
)
async def test_a_signal_interrupts_a_library_that_blocks(library: str, number: signal.Signals) -> None:
    """Whatever the library makes of it: its process is killed, and this one ends, as an event loop's handler would have it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, library, stdout=PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    process.send_signal(number)
    output, _ = await process.communicate()
    assert output.split() == ([] if library == "drops_and_blocks" else [b"interrupted"])
    assert process.returncode == 128 + number
    assert not command_line(child)


async def test_a_second_sigint_does_not_wait() -> None:
    """While the library cleans up."""
    program = PROGRAM.replace("CLEAN_UP_S = 0.3", "CLEAN_UP_S = 1000")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "drops_and_blocks", stdout=PIPE, start_new_session=True
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    # The first one has to be handled: two signals of one number may become one.
    process.send_signal(signal.SIGINT)
    while process.returncode is None:
        await asyncio.sleep(0.05)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 128 + signal.SIGINT


async def test_a_thread_other_than_the_main_one_is_not_interrupted() -> None:
    """Python hands signals to the main thread only; what runs there keeps its handlers."""
    before = signal.getsignal(signal.SIGTERM)

    def load() -> object:
        with interruptible():
            return signal.getsignal(signal.SIGTERM)

    assert await asyncio.to_thread(load) == before


def test_what_a_library_raises_is_raised() -> None:
    """Without a signal nothing changes, and handlers are what they were."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="own"), interruptible():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_fork_ends_as_it_would_by_itself() -> None:
    """A process that a library forks has this one's handlers until it sets its own."""
    read, write = os.pipe()
    with interruptible():
        pid = os.fork()
        if not pid:
            # A signal that comes before Python has completed the fork is lost.
            os.write(write, b"runs")
            # Not `pause`, which a signal that came before it does not end.
            for _ in range(1_000):
                time.sleep(0.01)
            os._exit(0)
        os.read(read, 4)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    os.close(read)
    os.close(write)
