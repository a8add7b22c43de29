"""Ports in memory, for actors that run in one process."""

from itertools import count

from headwater.actors.runtime.ports import MemoryBus, Ports
from headwater.events.memory import MemoryBlobs, MemoryLog, MemoryTable
from headwater.events.ports import Log
from tests.support.worlds.clock import ManualClock


def memory_world(clock: ManualClock) -> Ports:
    """All ports in memory."""
    numbers = count(1)
    log = MemoryLog(clock)

    async def pool_log(_: str) -> Log:
        return log

    return Ports(
        "ns",
        MemoryBus(),
        MemoryTable(clock),
        MemoryTable(clock),
        MemoryTable(clock),
        MemoryTable(clock),
        MemoryBlobs(),
        MemoryTable(clock),
        MemoryTable(clock),
        MemoryLog(clock),
        pool_log,
        clock,
        lambda: f"id{next(numbers)}",
    )
