"""What an item may cost at most: seconds, and the memory of the process that has it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from unittest.mock import patch

from headwater.actors.media.intake import IntakeProcess, MediaIntake

SAMPLE_S: Final = 0.005


class Peak:
    """The most memory that an intake's processes had, in KiB."""

    def __init__(self) -> None:
        self.kib = 0

    def note(self, pid: int) -> None:
        """Look at a process, unless it is gone: the system remembers its peak."""
        with suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/status") as file:
                for line in file:
                    if line.startswith("VmHWM"):
                        self.kib = max(self.kib, int(line.split()[1]))


@asynccontextmanager
async def bounded(intake: MediaIntake, seconds: float, kib_max: int) -> AsyncIterator[Peak]:
    """Fails if the block takes longer, or if a process of the intake ever has more memory than `kib_max`.

    Peaks of processes that are alive, or that the intake ends, are exact; one that ends by itself is looked at every `SAMPLE_S`.
    """
    peak, done = Peak(), threading.Event()
    for pid in tuple(intake.pids):
        # The peak begins anew.
        with suppress(OSError), open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")

    def look() -> None:
        for pid in tuple(intake.pids):
            peak.note(pid)

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            with suppress(RuntimeError):  # a process was started or ended just now
                look()

    kill = IntakeProcess.kill

    async def note_and_kill(process: IntakeProcess) -> None:
        peak.note(process.pid)
        await kill(process)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        with patch.object(IntakeProcess, "kill", note_and_kill):
            async with asyncio.timeout(seconds):
                yield peak
        with suppress(RuntimeError):
            look()
    finally:
        done.set()
        thread.join()
    assert peak.kib <= kib_max, f"{peak.kib} KiB; at most {kib_max}"
