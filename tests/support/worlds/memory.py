"""Ports in memory, for actors that run in one process."""

from itertools import count

from headwater.actors.bus.memory import MemoryBus
from headwater.actors.runtime.ports import Ports
from headwater.events.log import Log
from headwater.events.memory.log import MemoryLog
from headwater.events.memory.stores import MemoryBlobs, MemoryTable
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
