"""The spawner: processes forked on request, with their own environment, output, signals and exit code."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from headwater.ops.start.spawner import SpawnedProcess, Spawner, SpawnerLost
from tests.support.processes.fleet import command_line


def run(arguments: Sequence[str]) -> int:
    """What the tests' processes do."""
    match arguments:
        case ["exit", code]:
            return int(code)
        case ["raise"]:
            raise ValueError("on purpose")
        case ["show", name]:
            print(os.environ.get(name, "unset"), "HOME" in os.environ, sys.argv[1:])
        case ["sleep"]:
            time.sleep(60)
    return 0


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    """One that runs `run`."""
    made = Spawner.fork(run)
    yield made
    made.close()


async def gone(pid: int) -> None:
    """Wait until no such process exists."""
    async with asyncio.timeout(10):
        while command_line(pid):
            await asyncio.sleep(0.01)


async def printed(start: Callable[[list[int]], "asyncio.Future[SpawnedProcess]"]) -> str:
    """What a process prints on both outputs."""
    read, write = os.pipe()
    try:
        process = await start([write, write])
        await process.wait()
    finally:
        os.close(write)
    with os.fdopen(read) as output:
        return output.read()


async def test_exit_codes_come_back(spawner: Spawner) -> None:
    """Each process's own, in whatever order they end."""
    codes = [0, 3, 7, 200]
    started = [await spawner.spawn(["exit", str(code)], {}) for code in codes]
    assert [await process.wait() for process in started] == codes
    assert len({process.pid for process in started}) == len(codes)


async def test_a_process_has_exactly_the_environment_it_is_given(spawner: Spawner) -> None:
    """Nothing of the parent's, and its arguments without the program's name."""
    text = await printed(
        lambda ends: asyncio.ensure_future(spawner.spawn(["show", "RIVER"], {"RIVER": "Elbe"}, ends))
    )
    assert text == "Elbe False ['show', 'RIVER']\n"


async def test_an_exception_is_printed_and_is_exit_code_1(spawner: Spawner) -> None:
    """As Python does."""
    process_codes: list[int] = []

    async def start(ends: list[int]) -> SpawnedProcess:
        process = await spawner.spawn(["raise"], {}, ends)
        process_codes.append(await process.wait())
        return process

    text = await printed(lambda ends: asyncio.ensure_future(start(ends)))
    assert "ValueError: on purpose" in text
    assert process_codes == [1]


async def test_signals_reach_it_and_it_can_be_seen(spawner: Spawner) -> None:
    """SIGTERM ends it although the spawner ignores it; `ps` shows its command."""
    process = await spawner.spawn(["sleep"], {})
    async with asyncio.timeout(10):
        while not command_line(process.pid).startswith("headwater sleep"):
            await asyncio.sleep(0.01)
    assert os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


async def test_none_outlives_the_spawner() -> None:
    """Closed, it takes what it started along."""
    spawner = Spawner.fork(run)
    process = await spawner.spawn(["sleep"], {})
    spawner.close()
    await gone(process.pid)


async def test_a_killed_spawner_is_noticed() -> None:
    """Its processes end with it, and the next request fails instead of waiting."""
    spawner = Spawner.fork(run)
    process = await spawner.spawn(["sleep"], {})
    os.kill(spawner.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await gone(process.pid)
    with pytest.raises(SpawnerLost):
        await spawner.spawn(["exit", "0"], {})
    spawner.close()
